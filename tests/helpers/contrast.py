"""A script for a browser: how many texts its page shows, and those whose contrast is below 4.5."""

POOR_CONTRASTS = r"""() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const over = (color, [r, g, b]) => { // the color on an opaque one, whatever its notation
        canvas.fillStyle = `rgb(${r} ${g} ${b})`;
        canvas.fillRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const known = new Map([[null, [[255, 255, 255]]]]);
    const backgroundsOf = element => { // several: a gradient has each of its colors somewhere
        if (known.has(element)) return known.get(element);
        const { backgroundColor, backgroundImage } = getComputedStyle(element);
        const colors = backgroundImage.match(/(rgba?|color)\([^()]*\)/g) ?? [];
        const below = backgroundsOf(element.parentElement).map(under => over(backgroundColor, under));
        known.set(element, [...below, ...colors.flatMap(color => below.map(under => over(color, under)))]);
        return known.get(element);
    };
    const luminance = color => {
        const [r, g, b] = color.map(part => part / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (one, other) => { // WCAG 2
        const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
        return (high + 0.05) / (low + 0.05);
    };
    const opacityOf = element => element ? getComputedStyle(element).opacity * opacityOf(element.parentElement) : 1;
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), poor = [];
    let count = 0;
    for (let node; (node = walker.nextNode());) {
        const element = node.parentElement;
        if (!node.data.trim() && !element.matches(".sign") || !element.checkVisibility() || element.matches("option")) continue;
        count++;
        const { color } = getComputedStyle(element);
        const worst = Math.min(...backgroundsOf(element).map(background => contrast(over(color, background), background)));
        if (worst < 4.5 || opacityOf(element) < 1) poor.push(`${element.outerHTML.slice(0, 100)} ${worst.toFixed(2)}`);
    }
    return [count, poor];
}"""
