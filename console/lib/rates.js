// Rates per second from counters, and quantiles from histograms: what the plots of the overview show. Kept while the page is open.
import { get } from "./api.js";
import { store } from "./store.js";

const EVERY_MS = 2000;
const KEPT = 300;
const SERVICES_MAX = 12;
const COUNTERS = ["invoked", "succeeded", "failed", "cancelled", "killed"];

export const rates = store({ times: [], accepted: [], completed: [], failed: [], ours: [], ours99: [], commit: [], commit99: [], error: null, by_status: null, services: {} });

let before = null;
let timer = 0;
let users = 0;
let missing = false;

/** Samples while somebody watches. Returns the function that ends it. */
export function sample() {
  users += 1;
  if (users === 1) take();
  return () => {
    users -= 1;
    if (!users) clearTimeout(timer);
  };
}

async function take() {
  clearTimeout(timer);
  if (document.visibilityState === "visible") {
    try {
      const [statistics, metrics] = await Promise.all([statisticsNow(), metricsNow()]);
      add(statistics, metrics);
    } catch (error) {
      rates.set({ ...rates.get(), error });
    }
  }
  if (users) timer = setTimeout(take, EVERY_MS);
}

async function statisticsNow() {
  if (!missing) {
    try {
      return await get("/statistics");
    } catch (error) {
      if (!error.missing) throw error;
      missing = true; // An older node tells each service apart.
    }
  }
  const { services } = await get("/services");
  const totals = Object.fromEntries([...COUNTERS, "attempts_failed"].map((name) => [name, 0]));
  const by_status = {};
  const shown = {};
  for (const each of services) for (const [status, count] of Object.entries(each.invocations)) by_status[status] = (by_status[status] || 0) + count;
  for (const each of services.slice(0, SERVICES_MAX)) {
    const { totals: own = {} } = await get(`/services/${encodeURIComponent(each.name)}`);
    shown[each.name] = { ...own, by_status: each.invocations };
    for (const name of Object.keys(totals)) totals[name] += own[name] || 0;
  }
  return { totals: { ...totals, by_status }, services: shown };
}

async function metricsNow() {
  const response = await fetch("/metrics", { credentials: "same-origin" });
  return response.ok ? histograms(await response.text(), ["holdfast_ingress_seconds", "holdfast_partition_commit_seconds"]) : {};
}

/** name: Map of upper bound to count, summed over labels. */
export function histograms(text, names) {
  const found = Object.fromEntries(names.map((name) => [name, new Map()]));
  for (const line of text.split("\n")) {
    const name = names.find((each) => line.startsWith(`${each}_bucket`));
    if (!name) continue;
    const bound = line.match(/le="([^"]+)"/)?.[1];
    const count = Number(line.slice(line.lastIndexOf(" ")));
    if (bound && Number.isFinite(count)) found[name].set(bound, (found[name].get(bound) || 0) + count);
  }
  return found;
}

/** In ms; null if nothing was counted between two samples. */
export function quantile(now, then, share) {
  const buckets = [...(now || [])].map(([bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), count - (then?.get(bound) || 0)]).sort((a, b) => a[0] - b[0]);
  const all = buckets.length ? buckets[buckets.length - 1][1] : 0;
  if (all <= 0) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= all * share) {
      if (bound === Infinity) return low * 1000;
      return (low + (bound - low) * ((all * share - below) / Math.max(1, count - below))) * 1000;
    }
    [low, below] = [bound, count];
  }
  return low * 1000;
}

function add(statistics, metrics) {
  const at = Date.now() / 1000;
  const { totals } = statistics;
  const old = rates.get();
  const next = { ...old, error: null, by_status: totals.by_status, services: statistics.services };
  if (before && at - before.at < 60) {
    const seconds = at - before.at;
    const rate = (...names) => names.reduce((sum, name) => sum + Math.max(0, (totals[name] || 0) - (before.totals[name] || 0)), 0) / seconds;
    const push = (name, value) => (next[name] = [...old[name], value].slice(-KEPT));
    const [ingress, commit] = ["holdfast_ingress_seconds", "holdfast_partition_commit_seconds"];
    push("times", at);
    push("accepted", rate("invoked"));
    push("completed", rate("succeeded", "failed", "cancelled", "killed"));
    push("failed", rate("failed", "attempts_failed"));
    push("ours", quantile(metrics[ingress], before.metrics[ingress], 0.5));
    push("ours99", quantile(metrics[ingress], before.metrics[ingress], 0.99));
    push("commit", quantile(metrics[commit], before.metrics[commit], 0.5));
    push("commit99", quantile(metrics[commit], before.metrics[commit], 0.99));
  }
  before = { at, totals, metrics };
  rates.set(next);
}
