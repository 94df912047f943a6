// JSON of users, digit by digit: a double would round ids of 64 bits, and an edit of one field would change the others.

/** Browsers of before 2025 lack it and round. */
const isExact = typeof JSON.rawJSON === "function";

const keep = (name, value, context) => (Number.isInteger(value) && !Number.isSafeInteger(value) && /^-?\d+$/.test(context.source) ? JSON.rawJSON(context.source) : value);

/** Whole numbers that a double would round are objects of JSON.rawJSON, which JSON.stringify writes as they were. */
export const parse = (text) => (isExact ? JSON.parse(text, keep) : JSON.parse(text));

/** The digits of such a number; any other value as it is. */
export const digits = (value) => (isExact && JSON.isRawJSON(value) ? value.rawJSON : value);

const HIDDEN = /[\x80-\x9f\u202a-\u202e\u2066-\u2069]/g;

/** Text of handlers with the characters as escapes that would make it read differently from what it says. */
export const visible = (text) => String(text).replace(HIDDEN, (each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);
