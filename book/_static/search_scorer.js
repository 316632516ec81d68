// Sphinx's scores, with chapters and pages before the reference and before listings of the library.
var Scorer = {
  score: (result) => {
    const [page, , , , score] = result;
    if (page.startsWith("_modules/")) return score - 40;
    if (page.startsWith("notebooks/") || page === "book/glossary") return score + 20;
    return page.startsWith("book/api/") ? score - 10 : score;
  },
  objNameMatch: 11, objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
