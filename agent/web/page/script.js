"use strict";
(() => {
  const PATIENCE = 2000; // ms: a stream ends every 25 s, and the next begins 0.5 s later
  const AGAIN = 5000;
  const id = (name) => document.getElementById(name);
  const clock = (time) => new Date(time).toISOString().slice(11, 19) + " UTC";
  let stream = null, timer = 0, busy = false, due = false, lost = 0, polls = false;

  function say() {
    const gone = lost && Date.now() - lost >= PATIENCE;
    let text = polls ? `Live every ${AGAIN / 1000} s,` : "Live,";
    if (marked()) text = "Paused while text is selected,";
    if (gone) text = `Reconnecting since ${clock(lost)},`;
    if (id("link").textContent !== text) id("link").textContent = text;
    id("live").className = gone ? "lost" : "";
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

  async function refresh() {
    timer = 0;
    if (busy || marked()) {
      due = true;
      return say();
    }
    busy = true;
    due = false;
    try {
      const answer = await fetch("./", { cache: "no-store", signal: AbortSignal.timeout(AGAIN) });
      if (!answer.ok) throw new Error(answer.status);
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (page.documentElement.dataset.build !== document.documentElement.dataset.build) {
        location.reload();
        return;
      }
      document.title = page.title;
      for (const name of ["header", "main"])
        update(document.querySelector(name), page.querySelector(name));
      filter();
      lost = 0;
    } catch {
      lose();
    } finally {
      busy = false;
    }
    say();
    if (due) soon();
  }

  function soon() {
    timer = timer || setTimeout(refresh, 100);
  }

  function lose() {
    lost = lost || Date.now();
    setTimeout(say, PATIENCE + 50);
  }

  function follow() {
    if (stream) stream.close();
    stream = new EventSource("api/v1/status?watch=etag");
    const mine = stream;
    mine.onopen = mine.onmessage = () => {
      polls = false;
      lost = 0;
      soon();
    };
    mine.onerror = () => {
      if (mine.readyState !== EventSource.CLOSED) return lose();
      polls = true; // an answer other than a stream, such as 503: there are too many streams
      soon();
      setTimeout(() => mine === stream && follow(), AGAIN);
    };
  }

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) return follow();
    stream.close();
    stream = null;
  });
  document.addEventListener("selectionchange", () => due && !marked() && soon());
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
  follow();
})();
