async file => {
    for (const each of jupyterapp.shell.widgets('main')) if (each.context) each.context.model.dirty = false;
    await jupyterapp.commands.execute('application:close-all');
    await jupyterapp.serviceManager.sessions.shutdownAll();
    await jupyterapp.commands.execute('docmanager:open', {path: file});
}
