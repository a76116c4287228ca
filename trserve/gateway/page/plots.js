// The live plots: what the server says of itself once a second. Knows the events of
// /v1/trserve/stats/stream, and no requests of this page.

import { ApiError, events } from "./api.js";
import { number, percent, short, t } from "./catalogue.js";
import { byId, make } from "./dom.js";
import { colours } from "./theme.js";

const KEPT = 120;
const AGAIN_MS = 4000;
const WHY = { threshold: "whyThreshold", "nobody-runs": "whyNobody", timeout: "whyTimeout", drain: "whyDrain" };
const STATUS = { up: "modelUp", restarting: "modelRestarting", lost: "modelLost" };
const kept = [];
const openings = new Map();
let plots = [];
let following = false;

/** Values of a line: null leaves a gap. */
const line = (get, model = 0) => ({ model, points: kept.map(get) });

/** A plot: a caption, what it says in words, and its lines. */
function plot(title, words, lines, most = null) {
  const canvas = make("canvas", { role: "img" });
  const now = make("b");
  const name = make("span");
  const figure = make("figure", { className: "plot" }, make("figcaption", {}, name, now), canvas);
  return { figure, canvas, now, name, title, words, lines, most };
}

function build() {
  const both = (name) => [line((e) => e.latency_ms[name].p50), line((e) => e.latency_ms[name].p99, 1)];
  const latency = (name) => (e) => {
    const { p50, p99 } = e.latency_ms[name];
    return p50 === null ? t("none") : `${t("p50")} ${short(p50)}, ${t("p99")} ${short(p99)}`;
  };
  plots = [
    plot(() => t("plotTokens"), (e) => e.models.map((m) => `${m.name} ${number(m.tokens_per_s, 0)}`).join(", "), () => kept[0].models.map((_, n) => line((e) => e.models[n]?.tokens_per_s ?? null, n))),
    plot((e) => t("plotShare", { model: e.models[0].name }), () => keptShare(), () => [line((e) => e.share, 1)], 1),
    plot(() => t("plotFirst"), latency("first_token"), () => both("first_token")),
    plot(() => t("plotBetween"), latency("between_tokens"), () => both("between_tokens")),
    plot(() => t("plotQueue"), (e) => [t("liveRequests", { n: e.requests.live }), t("waiting", { n: e.requests.waiting }), t("pending", { n: pending(e) })].join(", "), () => [line((e) => e.requests.live), line(pending, 1), line((e) => e.requests.waiting, 2)]),
  ];
  const rows = plot(() => t("plotRows"), (e) => e.models.map((m) => `${m.name} ${m.rows_mean === null ? "-" : number(m.rows_mean, 1)}`).join(", "), null);
  plots.push(rows);
  byId("plots").replaceChildren(...plots.map((each) => each.figure), make("div", { id: "models-now", className: "scroll", tabIndex: 0, role: "group", "aria-labelledby": "live-title" }));
}

/** Of all that is kept, as its seconds have it. */
function keptShare() {
  const written = (which) => kept.reduce((sum, e) => sum + e.interval_s * e.models.reduce((all, m, n) => all + (which(n) ? m.tokens_per_s : 0), 0), 0);
  const total = written(() => true);
  return total ? percent(written((n) => n > 0) / total) : t("none");
}

function pending(event) {
  return event.models.reduce((sum, model) => sum + model.pending, 0);
}

function canvasOf({ canvas }) {
  const scale = Math.min(window.devicePixelRatio || 1, 2);
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, width, height);
  return { pen, width, height, scale };
}

function drawLines(each) {
  const { pen, width, height, scale } = canvasOf(each);
  const paint = colours();
  const lines = each.lines();
  const most = each.most ?? Math.max(1e-9, ...lines.flatMap(({ points }) => points.filter((v) => v !== null)));
  const room = height - 4 * scale;
  for (const { model, points } of lines) {
    pen.strokeStyle = paint.models[model % paint.models.length];
    pen.lineWidth = 1.6 * scale;
    pen.setLineDash([[], [5 * scale, 3 * scale], [1.5 * scale, 3 * scale]][model % 3]);
    pen.beginPath();
    pen.fillStyle = pen.strokeStyle;
    let open = false;
    points.forEach((value, index) => {
      const x = width - 2 * scale - ((points.length - 1 - index) / (KEPT - 1)) * (width - 4 * scale);
      const y = height - 2 * scale - (Math.min(value, most) / most) * room;
      if (value !== null) pen[open ? "lineTo" : "moveTo"](x, y);
      // One value between two gaps is no line.
      if (value !== null && !open && (points[index + 1] ?? null) === null) pen.fillRect(x - scale, y - scale, 2 * scale, 2 * scale);
      open = value !== null;
    });
    pen.stroke();
  }
  pen.setLineDash([]);
  pen.fillStyle = paint.soft;
  pen.font = `${10 * scale}px system-ui, sans-serif`;
  if (each.most === null && most > 1e-9) pen.fillText(short(most), 2 * scale, 10 * scale);
}

/** How many steps had how many rows in what is kept, one group of bars for each width. */
function drawRows(each) {
  const { pen, width, height, scale } = canvasOf(each);
  const paint = colours();
  const models = kept.at(-1).models.length;
  const sums = Array.from({ length: models }, () => new Map());
  for (const event of kept) event.models.forEach((model, n) => Object.entries(model.rows).forEach(([rows, count]) => sums[n]?.set(rows, (sums[n].get(rows) ?? 0) + count)));
  const order = (rows) => (rows === "more" ? Infinity : Number(rows));
  const widths = [...new Set(sums.flatMap((sum) => [...sum.keys()]))].sort((a, b) => order(a) - order(b));
  if (!widths.length) return;
  const room = Math.min(width / widths.length, 60 * scale);
  pen.font = `${10 * scale}px system-ui, sans-serif`;
  widths.forEach((rows, place) => {
    sums.forEach((sum, n) => {
      const share = (sum.get(rows) ?? 0) / Math.max(1, ...sum.values());
      const bar = (room - 8 * scale) / models;
      pen.fillStyle = paint.models[n % paint.models.length];
      const tall = share * (height - 16 * scale);
      pen.fillRect(place * room + n * bar, height - 13 * scale - tall, bar - 1, tall);
      if (n && tall > 3 * scale) pen.clearRect(place * room + n * bar + bar / 2 - 1, height - 13 * scale - tall + 2, 2, tall - 2);
    });
    pen.fillStyle = paint.soft;
    pen.fillText(rows === "more" ? ">256" : `≤${rows}`, place * room, height - 2 * scale);
  });
}

function why(name) {
  const sums = openings.get(name) ?? {};
  const total = Object.values(sums).reduce((sum, n) => sum + n, 0);
  const parts = Object.entries(sums).filter(([, n]) => n).sort((a, b) => b[1] - a[1]);
  return parts.map(([reason, n]) => `${t(WHY[reason] ?? reason)} ${Math.round((100 * n) / total)} %`).join(", ") || "-";
}

function modelTable(event) {
  const head = ["colModel", "colRunning", "colPending", "colRows", "colB", "colKv", "colWhy"].map((key) => make("th", { scope: "col" }, t(key)));
  const rows = event.models.map((m) => {
    const name = m.status === "up" ? m.name : `${m.name} (${t(STATUS[m.status] ?? m.status)})`;
    const cells = [m.running, m.pending, m.rows_mean === null ? "-" : number(m.rows_mean, 1), m.batch_threshold, percent(m.kv_used), why(m.name)];
    return make("tr", {}, make("th", { scope: "row" }, name), ...cells.map((value) => make("td", {}, String(value))));
  });
  return make("table", { className: "models" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}

export function drawPlots() {
  if (!kept.length) {
    byId("live-state").textContent = t("liveWait");
    return;
  }
  const event = kept.at(-1);
  byId("live-state").textContent = t("liveOn");
  if (!plots.length) build();
  for (const each of plots) {
    each.name.textContent = each.title(event);
    each.now.textContent = each.words(event);
    each.canvas.setAttribute("aria-label", `${each.name.textContent}: ${each.now.textContent}`);
    if (each.lines) drawLines(each);
    else drawRows(each);
  }
  byId("models-now").replaceChildren(modelTable(event));
}

function take(event) {
  if (!event.models) return; // it came between two looks and tells of the phase alone
  kept.push(event);
  if (kept.length > KEPT) kept.shift();
  for (const model of event.models) {
    const sums = openings.get(model.name) ?? {};
    for (const [reason, n] of Object.entries(model.openings)) sums[reason] = (sums[reason] ?? 0) + n;
    openings.set(model.name, sums);
  }
  drawPlots();
}

/** Follow the server's statistics for as long as the page is there; `moment` hears every event. */
export async function follow(moment) {
  if (following) return;
  following = true;
  drawPlots();
  for (;;) {
    try {
      for await (const data of events("v1/trserve/stats/stream")) {
        const event = JSON.parse(data);
        moment(event);
        take(event);
      }
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        following = false;
        return; // whoever gives the key begins this again
      }
      if (error instanceof ApiError && error.status === 429) byId("live-state").textContent = t("liveFull");
      // Whoever does not answer at all is told of in the page's state, and asked again here.
    }
    await new Promise((go) => setTimeout(go, AGAIN_MS));
  }
}
