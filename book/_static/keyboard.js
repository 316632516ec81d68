// What scrolls can be reached, and so scrolled, by the keyboard.
const reach = () => {
  for (const box of document.querySelectorAll("figure.drawn, table, pre, div.math, div.cell_output, div.cell_output div")) {
    const style = getComputedStyle(box);
    const sideways = box.scrollWidth > box.clientWidth && style.overflowX !== "visible";
    const scrolls = sideways || (box.scrollHeight > box.clientHeight + 2 && style.overflowY !== "visible");
    if (scrolls) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};
addEventListener("load", reach);
addEventListener("resize", reach);
