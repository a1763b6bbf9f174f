"use strict";
// Sorts a table by the column whose heading is pressed: numbers by their exact value, text by its letters.
function valueOf(cell) {
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
}
function sortBy(table, column, heading) {
  const sign = heading.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  const rows = Array.from(table.tBodies[0].rows);
  rows.sort((one, other) => {
    const [a, b] = [valueOf(one.cells[column]), valueOf(other.cells[column])];
    if (typeof a !== typeof b) return typeof a === "string" ? 1 : -1;
    return sign * (typeof a === "number" ? a - b : a.localeCompare(b));
  });
  for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  table.tBodies[0].append(...rows);
}
for (const table of document.querySelectorAll("table")) {
  Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortBy(table, column, heading));
    heading.append(button);
  });
}
// One box for each policy shows or hides its lines on every plot.
const results = document.getElementById("results");
const column = Array.from(results.tHead.rows[0].cells).findIndex((cell) => cell.textContent === "policy");
const policies = Array.from(new Set(Array.from(results.tBodies[0].rows, (row) => row.cells[column].textContent)));
const toggles = document.createElement("p");
toggles.className = "toggles";
policies.forEach((policy, series) => {
  const box = document.createElement("input");
  box.type = "checkbox";
  box.checked = true;
  box.addEventListener("change", () => {
    for (const line of document.querySelectorAll(".series-" + series)) line.classList.toggle("off", !box.checked);
  });
  const label = document.createElement("label");
  label.append(box, " ", policy);
  toggles.append(label);
});
results.parentElement.after(toggles);
