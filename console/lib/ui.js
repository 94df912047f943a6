// The one import for components: Preact with its hooks, and htm in place of a build step.
import { h } from "../vendor/preact.js";
import htm from "../vendor/htm.js";

export { render, Component, Fragment } from "../vendor/preact.js";
export { useState, useEffect, useLayoutEffect, useMemo, useCallback, useRef } from "../vendor/hooks.js";
export const html = htm.bind(h);

export const classes = (...names) => names.filter(Boolean).join(" ");
