// SPDX-License-Identifier: Apache-2.0
// A long table gets a field above it: rows stay that have every word of it in any cell.
const LONG = 15

function filterable(table) {
  const rows = [...table.tBodies[0].rows].map((row) => ({ row, text: row.textContent.toLowerCase() }))
  const heading = [...document.querySelectorAll("h1, h2, h3")]
    .filter((one) => one.compareDocumentPosition(table) & Node.DOCUMENT_POSITION_FOLLOWING).pop()
  const title = heading ? heading.firstChild.textContent.trim() : "rows"
  const field = document.createElement("input")
  field.type = "search"
  field.className = "filter"
  field.placeholder = `Filter ${rows.length} rows: words, in any order`
  field.setAttribute("aria-label", `Filter ${title}`)
  const count = document.createElement("p")
  count.className = "filter-count"
  count.setAttribute("role", "status")
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean)
    let shown = 0
    for (const { row, text } of rows) {
      row.hidden = !words.every((word) => text.includes(word))
      if (!row.hidden) shown += 1
    }
    count.textContent = words.length ? `${shown} of ${rows.length}` : ""
  })
  const outer = table.closest(".md-typeset__scrollwrap") || table
  outer.before(field, count)
}

for (const table of document.querySelectorAll(".md-content table")) {
  if (table.tBodies.length && table.tBodies[0].rows.length > LONG) filterable(table)
}
