"use strict";
(() => {
  const PERIOD = 2000; // ms between two questions
  const PATIENCE = 5000; // ms for one answer
  const id = (name) => document.getElementById(name);
  let etag = "", lost = 0;

  async function look() {
    try {
      const answer = await fetch("./", {
        cache: "no-store", headers: { "If-None-Match": etag }, signal: AbortSignal.timeout(PATIENCE),
      });
      if (!answer.ok && answer.status !== 304) throw new Error(answer.status);
      if (answer.ok && !marked()) {
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        if (page.documentElement.dataset.build !== document.documentElement.dataset.build)
          return location.reload();
        document.title = page.title;
        for (const now of page.querySelectorAll("[data-live]")) {
          const old = id(now.id);
          if (old.innerHTML !== now.innerHTML) old.innerHTML = now.innerHTML;
        }
        filter();
        etag = answer.headers.get("ETag");
      }
      lost = 0;
    } catch {
      lost = lost || Date.now();
    }
    say();
    setTimeout(poll, PERIOD);
  }

  function poll() {
    if (!document.hidden) return look();
    document.addEventListener("visibilitychange", poll, { once: true });
  }

  function say() {
    let text = "Live,";
    if (marked()) text = "Paused while text is selected,";
    if (lost) text = `The agent has not answered since ${new Date(lost).toISOString().slice(11, 19)} UTC; shown`;
    if (id("link").textContent !== text) id("link").textContent = text;
    id("live").className = lost ? "bad" : "";
  }

  function marked() {
    const chosen = getSelection();
    return !chosen.isCollapsed && document.querySelector("main").contains(chosen.anchorNode);
  }

  function filter() {
    const words = id("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = [...document.querySelectorAll("#allocations tbody tr")];
    for (const row of rows) {
      const names = [...row.cells].slice(0, 3).map((cell) => cell.textContent).join("/");
      const text = `${names} gpu ${row.cells[3].textContent}`.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    const shown = rows.filter((row) => !row.hidden).length;
    id("shown").textContent = words.length ? `${shown} of ${rows.length}` : "";
  }

  id("filtering").hidden = false;
  document.addEventListener("input", filter);
  look();
})();
