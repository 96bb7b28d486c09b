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

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
const shade = (word) => SHADES[word] ?? "bad";

function ago(since) {
  return since ? ` for ${Math.max(0, Date.now() / 1000 - since).toFixed(0)} s` : "";
}

function showSummary(fleet) {
  find("name").textContent = `fleet ${fleet.name}`;
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

function notices(fleet) {
  const told = [];
  if (fleet.pause) told.push(`Paused by ${fleet.pause.by}${ago(fleet.pause.since)}.`);
  if (fleet.call) told.push(`${fleet.call.what} on its way${ago(fleet.call.since)}, by ${fleet.call.by}.`);
  if (fleet.round?.reason) told.push(`Round ${fleet.round.id}: ${fleet.round.reason}.`);
  if (fleet.membership.changed) {
    told.push(`Membership changed: the next init needs world_size=${fleet.membership.world_size}.`);
  }
  return told.join("\n");
}

function replicaRow(r) {
  const last = r.rank_offset + r.world_size - 1;
  const ranks = r.rank_offset === null ? "" : [...new Set([r.rank_offset, last])].join("–");
  return [cell(r.id), cell(r.state, shade(r.state)), cell(r.weight_version), cell(ranks),
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
    find("notice").textContent = notices(fleet);
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
