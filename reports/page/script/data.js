// The data of the page: one table of all cases, and chunks with the details of some, decoded when a case is opened.

let DATA = null;
const opened = new Map();

async function unpack(id) {
  const packed = atob(byId(id).textContent);
  const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

async function loadTable() {
  DATA = JSON.parse(await unpack("data"));
  DATA.columnsOf = new Map();
  DATA.columns.forEach((column, i) => {
    column.index = i;
    if (!DATA.columnsOf.has(column.implementation)) DATA.columnsOf.set(column.implementation, []);
    DATA.columnsOf.get(column.implementation).push(column);
  });
  DATA.numbers = new Map(DATA.cases.map((id, i) => [id, i]));
  DATA.chapterNames = new Set(DATA.chapters.map(([name]) => name));
}

// Of a case without a record, undefined.
const verdictOf = (column, number) =>
  column.verdicts[number] === NO_RECORD ? undefined : VERDICTS[column.verdicts[number]];

const reasonOf = (column, number) => DATA.reasons[column.reasons[number]];

// Whether the runs disagree about a case of one implementation; `skips` says whether a skip is a verdict like another.
function differs(columns, number, skips) {
  const verdicts = new Set();
  for (const column of columns) {
    const verdict = verdictOf(column, number);
    if (verdict !== undefined && (skips || !SKIPS.has(verdict))) verdicts.add(verdict);
  }
  return verdicts.size > 1;
}

// The records of a case by the index of their column, with their traces as lists of lines.
async function recordsOf(number) {
  const chunk = DATA.chunks.findLastIndex((first) => first <= number);
  if (!opened.has(chunk)) opened.set(chunk, unpack(`details-${chunk}`).then(JSON.parse));
  const { lines, traces, records } = await opened.get(chunk);
  const found = new Map();
  for (const [index, record] of Object.entries(records[number - DATA.chunks[chunk]])) {
    const collectives = (record.collectives || []).map(([ranks, trace]) => ({
      ranks,
      lines: traces[trace].map((line) => lines[line]),
    }));
    found.set(Number(index), { ...record, collectives });
  }
  return found;
}
