// What scrolls sideways can be reached, and so scrolled, by the keyboard.
const reach = () => {
  for (const box of document.querySelectorAll("figure.drawn, table, pre, div.math")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};
addEventListener("load", reach);
addEventListener("resize", reach);
