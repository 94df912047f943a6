// What cannot wait for the modules: the theme, the modules of the page that was asked for, and the answers that it will need.
// They are on their way while the browser still reads app.js. lib/api.js takes the answers from `early`.
"use strict";
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is blocked: the system decides.
}
{
  const PARTS = {
    overview: "pages/overview lib/rates parts/plot parts/status",
    invocations: "pages/invocations parts/actions parts/filters parts/status",
    invocation: "pages/invocation parts/actions parts/status parts/step parts/waterfall",
    inbox: "pages/inbox parts/actions parts/approval parts/status parts/step parts/waterfall",
    services: "pages/services parts/status parts/try_it",
    objects: "pages/objects parts/status",
    cluster: "pages/cluster",
    sql: "pages/sql",
    webhooks: "pages/webhooks",
    audit: "pages/audit",
    tokens: "pages/tokens",
  };
  const ANSWERS = { overview: ["/services", "/statistics"], invocations: ["/services", "/statistics"], services: ["/services"] };
  const [first = "", second] = location.hash.replace(/^#\/?/, "").split("?")[0].split("/");
  const name = first === "invocations" && second ? "invocation" : first || "overview";
  const base = document.currentScript.src.replace(/[^/]*$/, "");
  for (const part of Object.hasOwn(PARTS, name) ? PARTS[name].split(" ") : []) {
    const link = document.createElement("link");
    link.rel = "modulepreload";
    link.href = `${base}${part}.js`;
    document.head.append(link);
  }
  window.early = new Map();
  const ask = (path) => {
    const answer = fetch(path, { credentials: "same-origin", signal: AbortSignal.timeout(30_000) });
    answer.catch(() => {}); // Whoever takes it says what is wrong.
    window.early.set(path, { answer, at: Date.now() });
    return answer;
  };
  const askAll = () => ["/cluster", "/deployments", "/pauses", ...(ANSWERS[name] || [])].forEach(ask);
  const session = ask("/session");
  let known = false;
  try {
    known = localStorage.getItem("known") === "yes";
  } catch {
    // Storage is blocked: as on the first visit.
  }
  if (known) askAll();
  else session.then((answer) => answer.clone().json()).then(({ node }) => node && askAll(), () => {}); // Strangers would be refused.
}
