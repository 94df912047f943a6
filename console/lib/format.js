// Times, durations, sizes and ids for people.
import { store } from "./store.js";

export const now = store(Date.now());
setInterval(() => document.visibilityState === "visible" && now.set(Date.now()), 1000);

const absolute = new Intl.DateTimeFormat(undefined, {
  year: "numeric", month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit",
  fractionalSecondDigits: 3, timeZoneName: "short",
});
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat(undefined, { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const count = new Intl.NumberFormat("en");

export const ms = (time) => (time ? Date.parse(time) : NaN);
export const number = (value) => (value === null || value === undefined ? "–" : count.format(value));
export const exact = (time) => (Number.isNaN(ms(time)) ? "" : absolute.format(ms(time)));
export const atClock = (stamp) => clock.format(stamp);
export const atDay = (time) => day.format(ms(time));

const UNITS = [["d", 86_400_000], ["h", 3_600_000], ["min", 60_000], ["s", 1000]];

export function duration(milliseconds) {
  if (!Number.isFinite(milliseconds)) return "–";
  const value = Math.max(0, milliseconds);
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 60_000) return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
  const at = UNITS.findIndex(([, size]) => value >= size);
  const [unit, size] = UNITS[at];
  const whole = Math.floor(value / size);
  const [smaller, smallerSize] = UNITS[at + 1];
  const rest = Math.floor((value - whole * size) / smallerSize);
  return rest && whole < 10 ? `${whole} ${unit} ${rest} ${smaller}` : `${whole} ${unit}`;
}

/** 12 s ago, in 3 min. */
export function relative(time, at = Date.now()) {
  const difference = at - ms(time);
  if (Number.isNaN(difference)) return "–";
  const distance = Math.abs(difference);
  if (distance < 1000) return "now";
  const [unit, size] = UNITS.find(([, each]) => distance >= each);
  const text = `${Math.floor(distance / size)} ${unit}`;
  return difference > 0 ? `${text} ago` : `in ${text}`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let rest = value;
  while (rest >= 1024 && at < units.length - 1) {
    rest /= 1024;
    at += 1;
  }
  return `${at && rest < 10 ? rest.toFixed(1) : Math.round(rest)} ${units[at]}`;
}

export const shortId = (id) => (id && id.length > 16 ? `${id.slice(0, id.indexOf("_") + 5)}…${id.slice(-4)}` : id || "–");
export const plural = (n, one, many = `${one}s`) => `${number(n)} ${n === 1 ? one : many}`;
export const oneLine = (value) => (typeof value === "string" ? value : JSON.stringify(value)) ?? "";

const HIDDEN = /[\x80-\x9f\u202a-\u202e\u2066-\u2069]/g;

/** Text of handlers, with escapes for the characters that would make it read differently from what it says. */
export const visible = (text) => String(text).replace(HIDDEN, (each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);
