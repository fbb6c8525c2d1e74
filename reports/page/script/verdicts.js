// The verdicts, gravest first, as in the run files. Their signs and colours are in style/matrix.css.

const VERDICTS = [
  "harness-error",
  "crash",
  "fail",
  "hang",
  "unmet",
  "unsupported",
  "expected-fail",
  "unexpected-pass",
  "pass",
];
const NO_RECORD = ".";
const SKIPS = new Set(["unmet", "unsupported"]);

// A verdict as its sign and word.
const badge = (verdict) => el("span", { class: `verdict ${verdict}` }, verdict);

// The number of a verdict; its word is for screen readers, its sign for the others.
const tally = (verdict, count) =>
  el("span", { class: `verdict ${verdict}`, title: `${count} ${verdict}` }, String(count), hidden(` ${verdict}`));
