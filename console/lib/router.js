// Where the user is: everything behind the # of the address, so that a link shows the same page to the next person.
// The part behind # never reaches a server, and the paths of the admin API stay free.
import { store } from "./store.js";

function read() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return {
    path: path.split("/").filter(Boolean).map(decode),
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export const route = store(read());
addEventListener("hashchange", () => route.set(read()));

export function href(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = `#/${path.map(encodeURIComponent).join("/")}`;
  return given.length ? `${text}?${new URLSearchParams(given)}` : text;
}

export function go(path, query = {}) {
  location.hash = href(path, query);
}

/** Changes parts of the query. The address changes without a new entry in the history. */
export function setQuery(changes) {
  const { path, query } = route.get();
  history.replaceState(null, "", href(path, { ...query, ...changes }));
  route.set(read());
}
