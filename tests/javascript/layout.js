async () => {
    const wrong = [];
    for (const [number, cell] of [...document.querySelectorAll('.jp-Notebook .jp-Cell')].entries()) {
        for (const part of cell.querySelectorAll('.jp-OutputArea-output, .jp-OutputArea-output *')) {
            const box = part.clientWidth > 0 && getComputedStyle(part).display !== 'inline';
            if (box && part.scrollWidth > part.clientWidth + 1)
                wrong.push(`cell ${number}: ${part.tagName} is ${part.scrollWidth} wide in ${part.clientWidth}`);
        }
        for (const image of cell.querySelectorAll('.jp-OutputArea-output img')) {
            if (image.alt.length < 20) wrong.push(`cell ${number}: a figure without alternative text`);
            const text = await (await fetch(image.src)).text();
            const svg = new DOMParser().parseFromString(text, 'image/svg+xml').documentElement;
            const scale = image.clientWidth / svg.viewBox.baseVal.width;
            const labels = [...svg.querySelectorAll('text, tspan')].filter(label => label.style.fontSize);
            if (!labels.length) wrong.push(`cell ${number}: a figure whose text cannot be measured`);
            for (const label of labels) {
                const size = parseFloat(label.style.fontSize) * scale;
                if (size < 16) wrong.push(`cell ${number}: ${label.textContent} has ${size} pixels`);
            }
        }
    }
    return wrong;
}
