// The state of the page, which is the fragment of its address: a link shows what its sender saw.

const LISTS = ["verdict", "impl", "open"];
const WORDS = ["chapter", "text", "differ", "rows", "case", "of"];

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const state = {};
  for (const name of LISTS) state[name] = given.getAll(name);
  for (const name of WORDS) state[name] = given.get(name) || "";
  return state;
}

function addressOf(state) {
  const given = new URLSearchParams();
  for (const name of LISTS) for (const value of state[name]) given.append(name, value);
  for (const name of WORDS) if (state[name]) given.append(name, state[name]);
  return `#${given}`;
}

// A step that the browser's Back should undo gets an entry of its own.
function writeAddress(state, { step = false } = {}) {
  const address = addressOf(state);
  if (address === (location.hash || "#")) return;
  history[step ? "pushState" : "replaceState"](null, "", address);
}
