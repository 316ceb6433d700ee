async figures => {
    const parse = text => (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const over = (top, below, see = 1) => below.map((part, i) => part + see * (top[3] ?? 1) * (top[i] - part));
    const linear = part => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.05 + 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const known = new Map(), low = new Set();
    let looked = 0;
    const look = (colour, ground, words, where) => {
        const [a, b] = [light(colour), light(ground)].sort((a, b) => a - b);
        if (!(b / a >= 4.5)) low.add(`${(b / a).toFixed(1)} ${where}: ${words.trim().slice(0, 40)}`);
        looked += 1;
    };
    const seen = element => {  // what is behind its text, and how opaque that is
        if (!element) return [[255, 255, 255], 1];
        if (!known.has(element)) {
            const [behind, opaque] = seen(element.parentElement), style = getComputedStyle(element);
            known.set(element, [over(parse(style.backgroundColor), behind, opaque), opaque * style.opacity]);
        }
        return known.get(element);
    };
    for (const area of document.querySelectorAll('.jp-OutputArea-output, #jp-right-stack')) {
        const texts = document.createTreeWalker(area, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {
            const words = texts.currentNode.data, element = texts.currentNode.parentElement;
            if (/^[\s\u25a0]*$/.test(words) || !element.getClientRects().length) continue;
            const [ground, opaque] = seen(element), colour = parse(getComputedStyle(element).color);
            look(over(colour, ground, opaque), ground, words, element.tagName + ' ' + element.className);
        }
    }
    const place = document.body.appendChild(document.createElement('div'));
    place.style = 'position: fixed; inset: 0; z-index: 99999; background: white';
    for (const image of figures ? document.querySelectorAll('.jp-OutputArea-output img[src^="data:image/svg"]') : []) {
        place.innerHTML = await (await fetch(image.src)).text();
        place.firstElementChild.style = 'width: 100vw; height: 100vh';
        for (const text of place.querySelectorAll('text')) {
            const box = text.getBoundingClientRect();
            let ground = [255, 255, 255];
            for (const part of document.elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2).reverse()) {
                if (!place.contains(part) || !(part instanceof SVGGeometryElement)) continue;
                const {fill, fillOpacity, opacity} = getComputedStyle(part);
                if (fill.startsWith('rgb')) ground = over(parse(fill), ground, fillOpacity * opacity);
            }
            const {fill, fillOpacity, opacity} = getComputedStyle(text);
            const colour = over(parse(fill), ground, fillOpacity * opacity);
            look(colour, ground, text.textContent, 'figure ' + image.alt.slice(0, 40));
        }
    }
    place.remove();
    return [looked, [...low]];
}
