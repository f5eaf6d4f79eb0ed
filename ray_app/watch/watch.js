// Puts the newest state of the run in place of the one that is shown; what was folded out stays so.
const PERIOD_MS = 2000;

async function look() {
  const lost = document.getElementById("lost");
  try {
    const answer = await fetch(location.href, { credentials: "same-origin" });
    if (!answer.ok) throw new Error(`the watcher answers ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const open = [...document.querySelectorAll("details")].map((details) => details.open);
    page.querySelectorAll("details").forEach((details, number) => { details.open = open[number] ?? false; });
    document.title = page.title;
    document.querySelector("main").replaceWith(page.querySelector("main"));
    lost.hidden = true;
  } catch (error) {
    lost.hidden = false;
    lost.textContent = `Not up to date: ${error.message}. Trying again.`;
  }
}

setInterval(() => { if (!document.hidden) look(); }, PERIOD_MS);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
