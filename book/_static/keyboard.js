// What scrolls sideways can be reached, and so scrolled, by the keyboard.
const reach = () => {
  for (const box of document.querySelectorAll("figure.drawn, table, pre, div.math, div.cell_output, div.cell_output div")) {
    const scrolls = box.scrollWidth > box.clientWidth && getComputedStyle(box).overflowX !== "visible";
    if (scrolls) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};
addEventListener("load", reach);
addEventListener("resize", reach);
