// Ranks the results of the site's search: pages that explain before those of modules.
var Scorer = {
  score: ([docname, title, anchor, description, score]) =>
    docname.startsWith("notebooks/api/") ? score - 5 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
