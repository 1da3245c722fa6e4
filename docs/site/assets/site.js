// Typeset equations, and let a click on a table's head sort it.
document$.subscribe(() => {
  for (const equation of document.querySelectorAll(".arithmatex:not(:has(.katex))")) {
    const tex = equation.textContent.trim().replace(/^\\\[|\\\]$/g, "")
    katex.render(tex, equation, { displayMode: true, fleqn: true, throwOnError: false })
  }
  for (const table of document.querySelectorAll("article table:not([data-sortable])")) {
    table.dataset.sortable = ""
    table.querySelectorAll("thead th").forEach((head, column) => {
      head.tabIndex = 0
      head.addEventListener("click", () => sort(table, head, column))
      head.addEventListener("keydown", (event) => event.key === "Enter" && sort(table, head, column))
    })
  }
})

// numbers by value, with what stands behind ± or a word left aside; what is no number goes last
function value(cell) {
  const number = parseFloat(cell.textContent.trim().replaceAll(",", "").replace("−", "-").replace(/^\./, "0."))
  return Number.isNaN(number) ? null : number
}

function sort(table, head, column) {
  const down = head.getAttribute("aria-sort") === "ascending"
  const body = table.tBodies[0]
  const rows = [...body.rows]
  const numeric = rows.some((row) => value(row.cells[column]) !== null) && rows.every((row) => {
    const text = row.cells[column].textContent.trim()
    return value(row.cells[column]) !== null || text === "–" || text === "-" || text === ""
  })
  rows.sort((a, b) => {
    const [x, y] = [a.cells[column], b.cells[column]]
    if (!numeric) return (down ? -1 : 1) * x.textContent.localeCompare(y.textContent)
    const [m, n] = [value(x), value(y)]
    if (m === null || n === null) return (m === null) - (n === null)
    return (down ? -1 : 1) * (m - n)
  })
  table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"))
  head.setAttribute("aria-sort", down ? "descending" : "ascending")
  body.append(...rows)
}
