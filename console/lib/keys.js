// Keys of the keyboard. A page adds its own; `?` shows what is bound.
import { useEffect, useRef } from "./ui.js";

const bound = [];

/** `keys`: {"j": ["Next row", function], ...} while the component is shown. */
export function useKeys(keys) {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    bound.push(latest);
    return () => bound.splice(bound.indexOf(latest), 1);
  }, []);
}

export const boundKeys = () => bound.flatMap((each) => Object.entries(each.current)).map(([key, [what]]) => [key, what]);

/** While a dialog is open, keys are its own, wherever the focus is: Escape closes it. */
const isField = (element) => element.closest("input, textarea, select, [contenteditable]") || document.querySelector("dialog[open]");

addEventListener("keydown", (event) => {
  const combined = event.ctrlKey || event.metaKey;
  const key = combined ? `Ctrl-${event.key.toLowerCase()}` : event.key;
  if (event.altKey || (!combined && isField(event.target))) return;
  for (const each of [...bound].reverse()) {
    const found = each.current[key];
    // Enter on a link or button is its own.
    if (!found || (key === "Enter" && event.target.closest("a, button"))) continue;
    event.preventDefault();
    found[1](event);
    return;
  }
});
