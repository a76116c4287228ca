// The table of all runs so far: what each cost, took and shared. Knows runs that have ended.

import { number, percent, short, t } from "./catalogue.js";
import { byId, make } from "./dom.js";
import { largestOf } from "./talk.js";

const runs = [];
const MOST = 200;

export function addRun(run, about) {
  runs.push({ run, about });
  if (runs.length > MOST) runs.shift();
  drawRuns();
}

function routerOf(run) {
  if (run.body.trserve.only) return "-";
  const given = Object.entries({ ...(run.threshold ? { [run.threshold.name]: run.threshold.value } : {}), ...run.body.trserve.router });
  return given.map(([name, value]) => `${name} ${short(value)}`).join(", ") || "-";
}

export function drawRuns() {
  byId("runs-panel").hidden = !runs.length;
  if (!runs.length) return;
  const head = ["runWho", "runParameters", "runTokens", "runShare", "runCost", "runFirst", "runTime"].map((key) => make("th", { scope: "col" }, t(key)));
  const rows = runs.map(({ run }) => {
    const { share, cost, first, time } = run.summary;
    const cells = [run.who(), routerOf(run), number(run.tokens.length), percent(share), cost === null ? "-" : number(cost, 3), first === null ? "-" : `${number(first)} ms`, `${number(time / 1000, 2)} s`];
    return make("tr", {}, ...cells.map((text) => make("td", {}, text)));
  });
  const known = runs.some(({ run }) => run.summary.cost !== null);
  const note = known ? make("caption", { className: "hint" }, t("costNote", { model: largestOf(runs.at(-1).about) })) : "";
  byId("runs").replaceChildren(note, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows.reverse()));
}

const quoted = (value) => `"${String(value).replaceAll('"', '""')}"`;

export function runsAsCsv() {
  const lines = runs.map(({ run }) => {
    const { share, cost, first, time, handoffs } = run.summary;
    return [quoted(run.who()), quoted(routerOf(run)), run.tokens.length, share, cost ?? "", handoffs ?? "", first ?? "", time].join(",");
  });
  return ["written_by,router,tokens,share,cost,handoffs,first_token_ms,time_ms", ...lines, ""].join("\n");
}
