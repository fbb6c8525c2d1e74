// Brings state, form, matrix and case together.

const TITLE = document.title;
let state = null;
let shownAs = null; // the filters that the matrix on the screen was made for

const filtersOf = ({ chapter, text, differ, rows, verdict, impl }) =>
  JSON.stringify([chapter, text, differ, rows, verdict, impl]);

function toggled(id, opens) {
  state = { ...state, open: opens ? [...state.open, id] : state.open.filter((one) => one !== id) };
  writeAddress(state);
}

let columns = [];
let cases = [];

function refreshMatrix() {
  if (shownAs === filtersOf(state)) return;
  shownAs = filtersOf(state);
  columns = shownColumns(state);
  cases = shownCases(state, columns);
  showMatrix(state, columns, cases, toggled);
  byId("none").hidden = cases.length > 0;
  byId("count").textContent =
    cases.length === DATA.cases.length
      ? `all ${plural(cases.length, "case")}`
      : `${cases.length.toLocaleString("en")} of ${plural(DATA.cases.length, "case")}`;
}

// Shows what the state says. The case gets the focus where the reader has just opened it.
async function apply({ opened = false } = {}) {
  const wanted = state;
  fillForm(state);
  refreshMatrix();
  document.title = state.case ? `${shortName(state.case)} · ${TITLE}` : TITLE;
  delete document.body.dataset.drawn;
  const draw = state.case ? await showCase(state, cases) : null;
  if (state !== wanted) return; // another case was chosen while this one was decoded
  byId("overview").hidden = Boolean(draw);
  article.hidden = !draw;
  if (!draw) return;
  if (opened) {
    scrollTo(0, 0);
    byId("case-title").focus();
  }
  await draw();
  document.body.dataset.drawn = wanted.case; // for the tests
}

async function openCase(id, of) {
  const left = state.case;
  state = { ...state, case: id, of };
  writeAddress(state, { step: true });
  await apply({ opened: id && id !== left });
  if (!id) returnTo(left);
}

// Back in the matrix, the focus is where it was.
function returnTo(id) {
  const link = [...matrix.querySelectorAll("th a[data-case]")].find((one) => one.dataset.case === id);
  (link || byId("matrix-title")).focus();
  if (link) link.scrollIntoView({ block: "center" });
}

function listen() {
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-case]");
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    openCase(link.dataset.case, link.dataset.of);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && state.case) openCase("", "");
  });
  const filter = () => {
    state = readForm(state);
    writeAddress(state);
    refreshMatrix();
  };
  form.addEventListener("input", filter);
  form.addEventListener("change", filter); // of a list, some browsers' drivers and tools send this alone
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    state = { ...readAddress(), chapter: "", text: "", differ: "", rows: "", verdict: [], impl: [] };
    writeAddress(state);
    apply();
  });
  addEventListener("popstate", () => {
    const left = state.case;
    state = readAddress();
    shownAs = null; // what is open in the matrix may have changed
    apply().then(() => {
      if (left && !state.case) returnTo(left);
    });
  });
}

async function start() {
  try {
    await loadTable();
  } catch (error) {
    byId("count").textContent = `The page cannot read its data: ${error.message}. It needs a browser of 2024 or later.`;
    return;
  }
  state = readAddress();
  listen();
  const applied = apply();
  performance.mark("matrix"); // for the tests, which measure the time to it
  await applied;
}

start();
