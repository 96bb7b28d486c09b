// Shows what the operator's routes answer, and nothing else: no state of its own, no writing.
"use strict";

const EVERY_MS = 1500;
const SHADES = { ready: "good", committed: "good", open: "wait", paused: "wait", updating: "wait",
  stale: "wait", joining: "wait", draining: "wait", asleep: "wait", undone: "wait" };

const find = (id) => document.getElementById(id);

async function ask(path) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers });
  if (answer.status === 401 || answer.status === 403) throw new Error("token");
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function cell(text, shade) {
  const td = document.createElement("td");
  td.textContent = text ?? "";
  if (shade) td.className = shade;
  return td;
}

function fill(table, rows) {
  const body = find(table).tBodies[0];
  body.replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    row.append(...cells);
    return row;
  }));
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleString([], { hour12: false });
const shade = (word) => SHADES[word] ?? "bad";

function ago(since) {
  return since ? ` for ${Math.max(0, Date.now() / 1000 - since).toFixed(0)} s` : "";
}

function showSummary(fleet) {
  find("name").textContent = fleet.name === "fleet" ? "fleet" : `fleet ${fleet.name}`;
  document.title = `${fleet.name}: ${fleet.weight_version}, ${fleet.phase}`;
  const gate = `${fleet.gate.state}${ago(fleet.gate.closed_since)}, ${fleet.gate.held} held`;
  const facts = { version: fleet.weight_version, phase: fleet.phase, gate,
    generation: fleet.generation, gateways: Object.keys(fleet.gateways).length };
  find("summary").replaceChildren(...Object.entries(facts).map(([name, value]) => {
    const pair = document.createElement("div");
    const term = document.createElement("dt");
    const told = document.createElement("dd");
    term.textContent = name;
    told.textContent = value;
    pair.append(term, told);
    return pair;
  }));
}

function notices(fleet, replicas) {
  const told = [];
  if (fleet.store) told.push(`The store fails${ago(fleet.store.since)}, so this may be old: ${fleet.store.reason}.`);
  if (fleet.hint) told.push(`Next: ${fleet.hint}.`);
  if (fleet.pause) told.push(`Paused by ${fleet.pause.by}${ago(fleet.pause.since)}.`);
  if (fleet.call) told.push(`${fleet.call.what} on its way${ago(fleet.call.since)}, by ${fleet.call.by}.`);
  if (fleet.round?.reason) told.push(`Round ${fleet.round.id}: ${why(fleet.round.reason, replicas)}.`);
  return told.join("\n");
}

// What the replicas' reasons tell below is not told twice.
function why(reason, replicas) {
  const at = reason.indexOf(": ");
  const isBelow = at > 0 && replicas.some((r) => (r.reason ?? "").includes(reason.slice(at + 2)));
  return isBelow ? `${reason.slice(0, at)} failed` : reason;
}

// A question mark is for the last label of a replica that may hold other weights.
function version(r) {
  return r.weight_version && !r.version_holds ? `${r.weight_version}?` : r.weight_version;
}

function replicaRow(r) {
  const last = r.rank_offset + r.world_size - 1;
  const ranks = r.rank_offset === null ? "" : [...new Set([r.rank_offset, last])].join("–");
  return [cell(r.id), cell(r.state, shade(r.state)), cell(version(r)), cell(ranks),
    cell(r.inflight), cell(r.reason)];
}

function roundRow(r) {
  const phases = r.phases.map((p) => `${p.phase} ${(p.elapsed_s * 1000).toFixed(0)} ms`).join(", ");
  return [cell(r.id), cell(r.result, shade(r.result)), cell(r.version), cell(clock(r.opened_at)),
    cell(phases), cell(r.reason)];
}

async function show() {
  try {
    const [fleet, replicas, rounds] = await Promise.all(
      [ask("/fleet"), ask("/fleet/replicas"), ask("/fleet/rounds?limit=20")]);
    showSummary(fleet);
    fill("replicas", replicas.replicas.map(replicaRow));
    fill("rounds", rounds.rounds.map(roundRow));
    find("no-rounds").hidden = rounds.rounds.length > 0;
    find("notice").textContent = notices(fleet, replicas.replicas);
    find("login").hidden = true;
  } catch (error) {
    const locked = error.message === "token";
    find("login").hidden = !locked;
    find("notice").textContent = locked ? "This fleet is shown to operators only."
      : `The gateway does not answer (${error.message}); what is shown may be old.`;
  }
  setTimeout(show, EVERY_MS);
}

find("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", find("token").value);
});

show();
