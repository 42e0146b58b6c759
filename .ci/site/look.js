// SPDX-License-Identifier: Apache-2.0
// What is wrong with a page as it is shown: widths, headings, alternative texts, labels, contrast.
() => {
  const found = []
  const column = document.querySelector(".md-content__inner") || document.body
  const edge = column.getBoundingClientRect().right + 1
  if (document.documentElement.scrollWidth > innerWidth + 1) found.push(`the page scrolls to ${document.documentElement.scrollWidth}px`)
  const clipped = (node) => {
    for (let one = node.parentElement; one && one !== column; one = one.parentElement)
      if (getComputedStyle(one).overflowX !== "visible") return true
    return false
  }
  for (const node of column.querySelectorAll("*")) {
    const box = node.getBoundingClientRect()
    if (box.width && box.right > edge && !clipped(node)) found.push(`wider than its column: ${node.tagName} ${node.className}`)
  }
  let before = 0
  for (const heading of document.querySelectorAll(".md-content h1, .md-content h2, .md-content h3, .md-content h4")) {
    const level = Number(heading.tagName[1])
    if (level > before + 1) found.push(`heading ${level} after ${before}: ${heading.textContent.slice(0, 40)}`)
    before = level
  }
  if (document.querySelectorAll("h1").length !== 1) found.push("not one h1")
  for (const image of document.images) if (!image.alt) found.push(`no alt: ${image.src}`)
  for (const field of document.querySelectorAll(".md-content :is(input, select)"))
    if (!field.labels?.length && !field.getAttribute("aria-label")) found.push(`no label: ${field.outerHTML.slice(0, 60)}`)
  const numbers = (text) => (text.match(/[\d.]+/g) || []).map(Number)
  const light = ([r, g, b]) => {
    const part = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b)
  }
  const over = ([r, g, b, a = 1], ground) => [r, g, b].map((value, i) => value * a + ground[i] * (1 - a))
  const ground = (node) => {
    const layers = []
    for (let one = node; one; one = one.parentElement) layers.push(numbers(getComputedStyle(one).backgroundColor))
    return layers.reverse().reduce((under, layer) => layer.length === 4 && !layer[3] ? under : over(layer, under), [255, 255, 255])
  }
  const seen = new Set()
  for (const node of column.querySelectorAll("p, li, td, th, a, code, span, h1, h2, h3, h4, label, select, button")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())
    const style = getComputedStyle(node)
    if (!own || !node.getClientRects().length || style.opacity === "0" || node.closest("svg, .headerlink")) continue
    const back = ground(node)
    const [one, other] = [light(over(numbers(style.color), back)), light(back)].sort((a, b) => b - a)
    const size = parseFloat(style.fontSize)
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5
    const ratio = (one + 0.05) / (other + 0.05)
    const key = `${node.tagName} ${node.className} ${style.color}`
    if (ratio < least && !seen.has(key)) {
      seen.add(key)
      found.push(`contrast ${ratio.toFixed(2)}: ${key} "${node.textContent.trim().slice(0, 30)}"`)
    }
  }
  return found
}
