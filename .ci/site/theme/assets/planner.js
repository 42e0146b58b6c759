// SPDX-License-Identifier: Apache-2.0
// Shows the plans of the chosen model, card and tokens; the address keeps the choice.
const answer = document.getElementById("plan-answer")

function row(cells, kind) {
  const line = document.createElement("tr")
  for (const text of cells) {
    const cell = document.createElement(kind)
    cell.textContent = text
    line.append(cell)
  }
  return line
}

function show(plans, hosts, fields) {
  const [model, card, tokens] = fields.map((field) => field.value)
  const found = plans[`${model} ${card} ${tokens}`]
  const said = document.createElement("p")
  const command = document.createElement("pre")
  command.textContent = `offload plan --framework pytorch --model ${model} --gpu ${card} --host-memory ${hosts[card]} --overrides seq_length=${tokens} micro_batch_size=1`
  if (typeof found === "string") {
    said.textContent = `Nothing fits: ${found}. The command says what would.`
    answer.replaceChildren(said, command)
    return
  }
  said.textContent = `In a host of ${hosts[card]}, the fastest first; step times are estimates by the card's rates.`
  const table = document.createElement("table")
  const head = table.createTHead()
  head.append(row(["Plan", "GPU, GiB", "Host, GiB", "Step, s", "Ratio to none"], "th"))
  const body = table.createTBody()
  for (const [label, gpu, host, least, most, ratio] of found) {
    body.append(row([label, gpu, host, `${least} to ${most}`, `${ratio}x`], "td"))
  }
  const wrap = document.createElement("div")
  wrap.className = "md-typeset__scrollwrap"
  wrap.append(table)
  answer.replaceChildren(said, wrap, command)
}

if (answer) {
  const read = (id) => JSON.parse(document.getElementById(id).textContent)
  const plans = read("plan-data")
  const hosts = read("plan-hosts")
  const fields = ["model", "card", "tokens"].map((name) => document.getElementById(`plan-${name}`))
  const asked = new URLSearchParams(location.hash.slice(1))
  const first = { model: "llama-3-8b", card: "rtx4090", tokens: "2048" }
  const absent = []
  for (const field of fields) {
    const name = field.id.slice(5)
    const wanted = asked.get(name) || first[name]
    const isHere = [...field.options].some((option) => option.value === wanted)
    if (!isHere) absent.push(`${name} ${wanted}`)
    field.value = isHere ? wanted : first[name]
    field.addEventListener("change", () => {
      const chosen = fields.map((one) => [one.id.slice(5), one.value])
      history.replaceState(null, "", `#${new URLSearchParams(chosen)}`)
      show(plans, hosts, fields)
    })
  }
  show(plans, hosts, fields)
  if (absent.length) {
    const said = document.createElement("p")
    said.textContent = `This page has no ${absent.join(", ")}; offload plan knows more.`
    answer.prepend(said)
  }
}
