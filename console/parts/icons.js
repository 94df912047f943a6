// Line icons of 16 px, drawn for the console.
import { html } from "../lib/ui.js";

const PATHS = {
  holdfast: "M8 1.5v6M8 7.5c0 3-4 2.5-5.500 6.500M8 7.500c0 3 4 2.500 5.500 6.500M8 7.500v7",
  overview: "M2 9.500h4v4.500H2zM2 2h4v4.500H2zM10 2h4v4.500h-4zM10 9.500h4v4.500h-4z",
  invocations: "M2 4h12M2 8h9M2 12h6",
  inbox: "M2 9l2-6h8l2 6v4.500H2zM2 9h3.500l1 2h3l1-2H14",
  services: "M2.500 3h11v4h-11zM2.500 9h11v4h-11zM5 5h0M5 11h0",
  objects: "M8 1.500l5.500 3v7L8 14.500l-5.500-3v-7zM2.500 4.500L8 7.500l5.500-3M8 7.500v7",
  cluster: "M8 2.500a1.500 1.500 0 1 0 .01 0M3.500 10.500a1.500 1.500 0 1 0 .01 0M12.500 10.500a1.500 1.500 0 1 0 .01 0M7.200 5.400L4.400 10.700M8.800 5.400l2.800 5.300M5.200 12h5.600",
  sql: "M3 4c0-2.700 10-2.700 10 0v8c0 2.700-10 2.700-10 0zM3 4c0 2.700 10 2.700 10 0M3 8c0 2.700 10 2.700 10 0",
  webhooks: "M8 2a3 3 0 0 1 2 5.200L12 11M5.500 6A3 3 0 0 1 8 2M4 9a3 3 0 1 0 3 3.500h5M12 11a1.500 1.500 0 1 1 0 3",
  audit: "M3.500 1.500h6l3 3v10h-9zM9.500 1.500v3h3M5.500 8h5M5.500 11h5",
  tokens: "M10 2a3.500 3.500 0 1 1-1.600 6.600L4 13H2v-2l5-4.700A3.500 3.500 0 0 1 10 2zM10.700 5.300h0",
  search: "M7 2.500a4.500 4.500 0 1 0 .01 0M10.300 10.300L14 14",
  collapse: "M2 2.500h12v11H2zM6 2.500v11M11.500 6l-2 2 2 2",
  sun: "M8 5a3 3 0 1 0 .01 0M8 1v1.500M8 13.500V15M1 8h1.500M13.500 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  moon: "M13.500 9.500A6 6 0 0 1 6.500 2.500a6 6 0 1 0 7 7z",
  auto: "M8 2a6 6 0 1 0 .01 0M8 2v12M8 5h4.500M8 8h6M8 11h4.500",
  copy: "M5.500 5.500h8v8h-8zM10.500 5.500v-3h-8v8h3",
  check: "M3 8.500l3.500 3.500L13 4.500",
  cross: "M4 4l8 8M12 4l-8 8",
  plus: "M8 3v10M3 8h10",
  warning: "M8 2L1.500 13.500h13zM8 6.500v3M8 11.500h0",
  info: "M8 2a6 6 0 1 0 .01 0M8 7.500V11M8 5h0",
  leave: "M6 2H2.500v12H6M10.500 5l3 3-3 3M13.500 8H6",
  right: "M6 3.500L10.500 8 6 12.500",
  down: "M3.500 6L8 10.500 12.500 6",
  more: "M3.500 8h0M8 8h0M12.500 8h0",
  play: "M4.500 2.500v11l9-5.500z",
  pause: "M5 3v10M11 3v10",
  restart: "M3 8a5 5 0 1 0 1.500-3.600M4.500 1.500v3h3",
  download: "M8 2v8M4.500 7L8 10.500 11.500 7M2.500 13.500h11",
  keyboard: "M1.500 4h13v8h-13zM4 6.500h0M6.700 6.500h0M9.300 6.500h0M12 6.500h0M5 9.500h6",
  link: "M6 3H3v10h10v-3M9 2.500h4.500V7M13.500 2.500L7.500 8.500",
};

export function Icon({ name, size = 16, label }) {
  return html`<svg width=${size} height=${size} viewBox="0 0 16 16" fill="none" stroke="currentColor" stroke-width="1.500"
    stroke-linecap="round" stroke-linejoin="round" role=${label ? "img" : undefined} aria-label=${label}
    aria-hidden=${label ? undefined : "true"}><path d=${PATHS[name]} /></svg>`;
}
