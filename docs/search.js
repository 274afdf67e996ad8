// Summaries of search results: from the article alone, and from its beginning where a result points to an index entry,
// which has no text of its own.

if (typeof Search !== "undefined") {
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    const article = page.querySelector("article.bd-article") ?? page.body;
    for (const part of article.querySelectorAll(".headerlink, script, style, .prev-next-area")) part.remove();
    const section = anchor && !anchor.startsWith("#index-") ? article.querySelector(anchor) : null;
    return (section ?? article).textContent.replace(/\s+/g, " ").trim() || page.title;
  };
}
