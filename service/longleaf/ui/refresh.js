"use strict";
const lost = document.getElementById("lost");
let seen = Date.now();
async function refresh() {
  try {
    const answer = await fetch(location.pathname + location.search, { signal: AbortSignal.timeout(15000) });
    if (!answer.ok) throw new Error(String(answer.status));
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.querySelector("main").replaceWith(page.querySelector("main"));
    seen = Date.now();
    lost.hidden = true;
  } catch {
    lost.textContent = `The gateway has not answered for ${Math.round((Date.now() - seen) / 1000)} s: this is how it was before.`;
    lost.hidden = false;
  }
  setTimeout(refresh, 2000);
}
setTimeout(refresh, 2000);
