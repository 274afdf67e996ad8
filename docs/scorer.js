// Search results of the site: a guide comes before a notebook, a notebook before the page of a single name.

var Scorer = {
  score: (result) => {
    const [page, , , , score] = result;
    return score + (page.startsWith("api/") ? -20 : page.startsWith("notebooks/") ? -3 : page === "changelog" ? -10 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
