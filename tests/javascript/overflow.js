() => {
    const slide = document.querySelector("section.here"), found = [];
    if (slide.scrollWidth > 1280 || slide.scrollHeight > 720) found.push("the slide");
    for (const part of slide.querySelectorAll("*")) {
        const box = part.getBoundingClientRect();
        if (box.right > 1281 || box.bottom > 721 || box.left < 0 || box.top < 0) found.push(part.outerHTML);
        if (part.tagName == "FIGURE" && box.height < 250) found.push("a figure of " + box.height);
    }
    return found.map(text => text.slice(0, 200));
}
