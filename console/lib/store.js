// A value that components watch.
import { useEffect, useState } from "./ui.js";

export function store(value) {
  const watchers = new Set();
  return {
    get: () => value,
    set(next) {
      if (Object.is(next, value)) return;
      value = next;
      for (const watch of [...watchers]) watch(value);
    },
    watch(watcher) {
      watchers.add(watcher);
      return () => watchers.delete(watcher);
    },
  };
}

export function useStore(watched) {
  const [value, set] = useState(watched.get());
  useEffect(() => {
    set(watched.get());
    return watched.watch(set);
  }, [watched]);
  return value;
}
