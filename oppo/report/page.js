"use strict";
// Draws the charts that are in view, by Plotly where the page holds it; finds samples; follows a run that goes on.
const COLOURS = ["#3b82f6", "#d97706", "#10a37a", "#8b5cf6", "#ef4444", "#ec4899", "#84cc16", "#6b7280"];
const DASHES = ["solid", "dot", "dash", "dashdot"];
const $ = (id) => document.getElementById(id);
let data = JSON.parse($("data").textContent);
const view = { smoothing: 0, log: false, range: null, changes: 0 };
const drawn = new Map(); // the number of the latest change that each chart shows, by its element
const visible = new Set();

function smoothed(values) {
  // Exponential moving average without the bias to its first values, as TensorBoard has it.
  let last = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = view.smoothing * last + (1 - view.smoothing) * value;
    weight = view.smoothing * weight + (1 - view.smoothing);
    return last / weight;
  });
}

function traces(chart) {
  const labels = [...new Set(chart.lines.map((line) => line.label))], several = data.runs.length > 1;
  return chart.lines.flatMap((line) => {
    const place = labels.indexOf(line.label), color = COLOURS[(several ? line.run : place) % COLOURS.length];
    const run = several ? data.runs[line.run] : "", label = labels.length > 1 || !several ? line.label : "";
    const trace = {
      x: line.x, y: line.y, name: escaped([run, label].filter(Boolean).join(": ")), mode: line.x.length < 40 ? "lines+markers" : "lines",
      line: { color, width: 1.8, dash: several ? DASHES[place % DASHES.length] : "solid" }, marker: { size: 4.5 },
      hovertemplate: "%{y:.4~g}",
    };
    if (line.error.length) trace.error_y = { array: line.error, color, thickness: 1, width: 3 };
    if (chart.stack && !several) return [{ ...trace, mode: "lines", stackgroup: line.run, line: { color, width: 0.5 } }];
    if (!view.smoothing || line.x.length < 3) return [trace];
    const raw = { ...trace, error_y: {}, opacity: 0.25, showlegend: false, hoverinfo: "skip", hovertemplate: null };
    return [raw, { ...trace, mode: "lines", y: smoothed(line.y) }];
  });
}

function escaped(text) {
  // Plotly reads some HTML in names: links and styles.
  return text.replace(/[&<>]/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;" })[sign]);
}

function whole() {
  const steps = data.charts.flatMap((chart) => chart.lines.flatMap((line) => [line.x[0], line.x.at(-1)]));
  const first = Math.min(...steps), last = Math.max(...steps), room = Math.max(0.4, (last - first) / 50);
  return [first - room, last + room];
}

function height(chart, [from, to]) {
  // Holds what is seen of the lines, with their intervals, and what the chart must hold.
  const seen = chart.lines.flatMap((line) => line.y.flatMap((value, k) => {
    if (value === null || line.x[k] < from || line.x[k] > to) return [];
    return [value - (line.error[k] ?? 0), value + (line.error[k] ?? 0)];
  }));
  const values = view.log ? seen.filter((value) => value > 0).map(Math.log10) : [...seen, ...chart.within];
  if (!values.length) return null;
  const [low, high] = [values, values].map((each, k) => each.reduce((one, other) => (k ? Math.max : Math.min)(one, other)));
  const room = 0.06 * (high - low) || 0.1 * Math.abs(high) || 1;
  return [low === 0 ? -room / 3 : low - room, high + room];
}

function counts(chart) {
  // Whether it is of a few whole numbers, between which there are no ticks.
  const values = chart.lines.flatMap((line) => line.y), most = values.reduce((one, other) => Math.max(one, other), 0);
  return !view.log && most <= 5 && most >= 2 && values.every((value) => value === null || (Number.isInteger(value) && value >= 0));
}

function draw(plot) {
  const chart = data.charts[plot.dataset.chart], style = getComputedStyle(document.body);
  const colour = (name) => style.getPropertyValue(name).trim(), grid = { gridcolor: colour("--line"), zerolinecolor: colour("--line") };
  const across = view.range ?? whole(), up = chart.stack && data.runs.length === 1 ? null : height(chart, across);
  const layout = {
    margin: { l: 52, r: 12, t: 8, b: 38 }, height: 230, hovermode: "x unified", uirevision: 1,
    font: { family: style.fontFamily, size: 11, color: colour("--dim") },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--dim"), activecolor: colour("--ink") }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    showlegend: chart.lines.length > 1, legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 10.5 } },
    xaxis: { ...grid, range: across, ...(across[1] - across[0] < 6 && { dtick: 1 }), uirevision: view.changes, hoverformat: ",d", tickformat: ",d", unifiedhovertitle: { text: "step %{x:,d}" }, title: { text: "step", standoff: 4, font: { size: 10.5 } } },
    yaxis: { ...grid, type: view.log ? "log" : "linear", uirevision: view.changes, automargin: true, autorange: !up, range: up, fixedrange: true, exponentformat: "power", nticks: 6, ...(counts(chart) && { dtick: 1 }) },
  };
  const options = { displaylogo: false, responsive: true, modeBarButtons: [["toImage"]] };
  const first = !drawn.has(plot);
  drawn.set(plot, view.changes);
  Plotly.react(plot, traces(chart), layout, options);
  if (first) plot.on("plotly_relayout", (change) => {
    if (change["xaxis.autorange"]) view.range = null;
    else if ("xaxis.range[0]" in change) view.range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    else return;
    refresh();
  });
}

function refresh() {
  view.changes += 1;
  visible.forEach(draw);
  document.body.dataset.drawn = drawn.size;
}

const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) visible.add(target); else visible.delete(target);
    if (isIntersecting && drawn.get(target) !== view.changes) draw(target);
  }
  document.body.dataset.drawn = drawn.size;
}, { rootMargin: "100px" });

function find() {
  const wanted = $("find").value.toLowerCase(), samples = [...document.querySelectorAll(".sample")];
  const key = { first: (each) => each.dataset.at, last: (each) => -each.dataset.at, best: (each) => -each.dataset.score, worst: (each) => each.dataset.score }[$("order").value];
  samples.sort((one, other) => key(one) - key(other)).forEach((each) => each.parentNode.append(each));
  for (const each of samples) {
    each.text ??= each.querySelector(".said").textContent.toLowerCase();
    each.hidden = !each.text.includes(wanted);
  }
  $("found").textContent = `${samples.filter((each) => !each.hidden).length} of ${samples.length}`;
}

function begin() {
  const plots = window.Plotly ? document.querySelectorAll(".plot") : [];
  visible.clear(); drawn.clear(); observer.disconnect();
  plots.forEach((plot) => observer.observe(plot));
  $("view").hidden = !plots.length;
  find();
}

async function follow() {
  // The page that the server makes of the run as it is now takes the place of this one's parts.
  let fresh;
  try {
    const answer = await fetch(`update?${document.body.dataset.live}`);
    if (answer.status !== 200) return; // nothing is new
    document.body.dataset.live = answer.headers.get("ETag");
    fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  } catch {
    $("lead").textContent = "The server of this page has ended."; // the last figures stay
    return;
  }
  const same = window.Plotly && fresh.querySelector(".curves").textContent === document.querySelector(".curves").dataset.said;
  data = JSON.parse(fresh.getElementById("data").textContent);
  for (const part of fresh.querySelectorAll("[data-part]")) {
    if (part.dataset.part !== "curves" || !same) document.querySelector(`[data-part=${part.dataset.part}]`).replaceWith(part);
  }
  remember();
  if (same) { refresh(); find(); } else begin();
}

const remember = () => { const curves = document.querySelector(".curves"); curves.dataset.said ??= curves.textContent; };

remember();
begin();
$("find").addEventListener("input", find);
$("order").addEventListener("change", find);
$("smoothing").addEventListener("input", (event) => { view.smoothing = event.target.value / 100; $("smooth").textContent = view.smoothing || "off"; refresh(); });
$("log").addEventListener("change", (event) => { view.log = event.target.checked; refresh(); });
$("whole").addEventListener("click", () => { view.range = null; refresh(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
if (document.body.dataset.live) setInterval(follow, 2000);
