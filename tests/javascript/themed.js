light => document.body.dataset.jpThemeLight === light
    && `${getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim() === 'white'}` === light
    && document.querySelector('#main').getClientRects().length > 0
    && !document.getAnimations().some(each => each instanceof CSSTransition)
