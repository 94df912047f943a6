// JSON without loss: a whole number beyond 2^53, such as an id of 64 bits, is read as a BigInt and written with all its digits.
// Otherwise whoever edits one field of a payload would change another one. Browsers without `JSON.rawJSON` round it, as ever.
const LONG = /\d{16}/;
const WHOLE = /^-?\d+$/;

const exact = (key, value, context) =>
  typeof value === "number" && !Number.isSafeInteger(value) && JSON.rawJSON && WHOLE.test(context?.source) ? BigInt(context.source) : value;

export const parse = (text) => (LONG.test(text) ? JSON.parse(text, exact) : JSON.parse(text));

BigInt.prototype.toJSON = function toJSON() {
  return JSON.rawJSON(this.toString());
};
