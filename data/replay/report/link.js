// Times on the reader's link to the store. After report.js.

texts.missing = "This combination was not replayed.";
adjusted.link = timeTraces;
document.getElementById("link")?.addEventListener("input", useLink);
document.getElementById("link")?.addEventListener("submit", (event) => event.preventDefault());

// A function of rows and their bytes as replayed, to milliseconds.
function linkMs(rows, bytes) {
  const form = document.getElementById("link");
  const bandwidth = Number(form.elements.bandwidth.value.replace(",", ".")) * 1e9;
  const input = form.elements.row_bytes;
  const width = Number(input.value.replace(",", "."));
  const moved = width > 0 && input.value !== input.dataset.model ? rows * width : bytes;
  return bandwidth > 0 ? (moved / bandwidth) * 1e3 : NaN;
}

function useLink() {
  for (const cell of document.querySelectorAll("[data-rows][data-bytes]")) {
    const { rows, bytes, batches } = cell.dataset;
    const ms = linkMs(Number(rows), Number(bytes));
    const value = batches === undefined ? ms / 1e3 : ms / Number(batches);
    const text = Number.isFinite(value) ? Number(value.toPrecision(4)).toLocaleString("en") : "–";
    cell.textContent = cell.tagName === "DD" ? `${text} ms` : text;
    cell.dataset.v = Number.isFinite(value) ? String(value) : "";
  }
  for (const [id, chart] of Object.entries(charts)) {
    if (Object.values(chart.figures).some((figure) => figure.layout.meta === "link")) draw(id);
  }
}

// Values of customdata: 1 and 2 rows fetched and written, 3 and 4 their bytes, 7 batches.
function timeTraces(data) {
  for (const trace of data) {
    if (trace.customdata?.[0]?.length < 8) continue;
    trace.y = trace.customdata.map((point) => linkMs(point[1] + point[2], point[3] + point[4]) / point[7]);
  }
}
