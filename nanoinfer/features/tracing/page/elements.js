// Elements of a page.
const byId = id => document.getElementById(id);

/** el("p.small", {title: "..."}, "text"): an element. A string becomes text, never markup: tokens and answers may look like tags. */
function el(tagAndClasses, properties = {}, ...children) {
  const [tag, ...classes] = tagAndClasses.split(".");
  const node = document.createElement(tag);
  node.classList.add(...classes);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
