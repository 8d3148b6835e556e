// What the theme leaves out for keyboards and screen readers: a box that scrolls sideways can be focused, and the buttons beside
// code are no landmark. The theme adds both after the page has loaded.
"use strict";
{
  const mend = () => {
    for (const box of document.querySelectorAll(".md-content :is(div, pre, figure)"))
      if (box.scrollWidth > box.clientWidth && /auto|scroll/.test(getComputedStyle(box).overflowX)) box.tabIndex = 0;
    for (const nav of document.querySelectorAll("nav.md-code__nav")) nav.setAttribute("role", "none");
  };
  let waits = false;
  const soon = () => {
    if (!waits) requestAnimationFrame(() => { waits = false; mend(); });
    waits = true;
  };
  addEventListener("resize", soon);
  document.addEventListener("DOMContentLoaded", () => {
    mend();
    new MutationObserver(soon).observe(document.querySelector(".md-content"), { childList: true, subtree: true });
  });
}
