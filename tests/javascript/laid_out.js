width => {
    const boxes = [...document.querySelectorAll('.jp-NotebookPanel, .jp-OutputArea-output, .jp-OutputArea-output *')];
    const sizes = boxes.map(each => [each.clientWidth, each.scrollWidth, each.clientHeight].join()).join(' ');
    const before = window.sizesBefore, {right} = boxes[0].getBoundingClientRect();
    window.sizesBefore = sizes;
    const figures = [...document.querySelectorAll('.jp-OutputArea-output img')];
    return width - 50 < right && right <= width && figures.every(each => each.naturalWidth) && sizes === before;
}
