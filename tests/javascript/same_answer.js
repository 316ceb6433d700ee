([name, html]) => {
    const made = document.createElement("div");
    const shown = document.querySelector(`#${name} .answer`).cloneNode(true);
    made.innerHTML = html;
    shown.querySelectorAll("figure > button").forEach(button => button.remove());
    return made.innerHTML == shown.innerHTML;
}
