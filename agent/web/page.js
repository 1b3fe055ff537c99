"use strict";
(() => {
  const PERIOD = 2000; // ms between two questions
  const PATIENCE = 5000; // ms for one answer
  const id = (name) => document.getElementById(name);
  let etag = "", lost = 0;

  async function ask(path, options) {
    const wish = { cache: "no-store", signal: AbortSignal.timeout(PATIENCE), ...options };
    const answer = await fetch(path, wish);
    if (!answer.ok && answer.status !== 304) throw new Error(answer.status);
    return answer;
  }

  // The status itself stays there: its ETag says whether the page is to be loaded anew.
  async function look() {
    try {
      const status = await ask("api/v1/status", { method: "HEAD", headers: { "If-None-Match": etag } });
      if (status.status !== 304 && !marked()) {
        const page = new DOMParser().parseFromString(await (await ask("./")).text(), "text/html");
        if (page.documentElement.dataset.build !== document.documentElement.dataset.build)
          return location.reload();
        document.title = page.title;
        for (const name of ["header", "main"])
          update(document.querySelector(name), page.querySelector(name));
        filter();
        etag = status.headers.get("ETag");
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
    id("live").className = lost ? "lost" : "";
  }

  function marked() {
    const chosen = getSelection();
    return !chosen.isCollapsed && document.querySelector("main").contains(chosen.anchorNode);
  }

  // Change `old` into `now` where they differ. What the reader did (open, hidden) stays.
  function update(old, now) {
    if (old.isEqualNode(now) || (old.dataset && "own" in old.dataset)) return;
    if (old.nodeType !== Node.ELEMENT_NODE) {
      old.nodeValue = now.nodeValue;
      return;
    }
    const kept = new Set(["open", "hidden"]);
    for (const { name } of [...old.attributes])
      if (!kept.has(name) && !now.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of now.attributes)
      if (!kept.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
    const olds = [...old.childNodes], nows = [...now.childNodes];
    const alike = olds.length === nows.length && olds.every((one, n) => one.nodeName === nows[n].nodeName);
    if (alike) olds.forEach((one, n) => update(one, nows[n]));
    else old.replaceChildren(...nows);
  }

  function filter() {
    const field = id("filter"), rows = id("rows");
    if (!field || !rows) return;
    id("filtering").hidden = false;
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows.rows) {
      const text = `${row.textContent} gpu ${row.cells[1].textContent}`.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += !row.hidden;
    }
    id("shown").textContent = words.length ? `${shown} of ${rows.rows.length}` : "";
  }

  document.addEventListener("keydown", (event) => {
    const field = id("filter");
    if (!field || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "/" && document.activeElement !== field) {
      event.preventDefault();
      field.focus();
    } else if (event.key === "Escape" && document.activeElement === field) {
      field.value = "";
      filter();
    }
  });
  document.addEventListener("input", filter);
  filter();
  look();
})();
