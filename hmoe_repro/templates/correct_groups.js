"use strict";
// Every text of the folder enters the page as textContent or as an attribute, never as HTML.
const $ = id => document.getElementById(id);
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#b59f00", "#8c6d46", "#7f7f7f"];  // of new groups
const NEW = "new";  // the choice of a new group in a menu
const UNPLACED = 0;  // key of the column of images that are in no group yet
const GONE = -1;     // key of images that are no longer in the folder

let data = null;        // what the server has: files, confidence, unsure, found
let groups = [];        // {key, name, colour, home}: home is the found group that most of its images have
let groupOf = [];       // number of an image -> key of its group
let order = [];         // number of an image -> time of its last move
let lastKey = 0;
let clock = 0;
let past = [];          // snapshots for undo and redo
let future = [];
let savedState = "";
let saved = null;       // the snapshot that the file has
let saving = false;     // a save is on its way
let training = false;   // a training is running
let finished = false;   // the page has ended: nothing can be changed
const selected = new Set();
let anchor = null;      // where Shift+click begins
let dragged = null;     // numbers of the images that are dragged
const tiles = new Map();    // number of an image -> its element
const columns = new Map();  // key of a group -> its elements

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const say = text => { $("said").textContent = text; };

function show(text, good = false, ...buttons) {
  $("message").style.setProperty("--bar", `${document.querySelector(".bar").offsetHeight}px`);
  $("message").hidden = !text;
  $("message").classList.toggle("good", good);
  $("message").firstElementChild.textContent = text;
  for (const id of ["reload", "overwrite"]) $(id).hidden = !buttons.includes(id);
}

// A message is about the last step. Only a choice that is still open stays.
function forget() {
  if ($("reload").hidden) show("");
}

// The state and its history.

const snapshot = () => ({groups: groups.map(group => ({...group})), groupOf: [...groupOf], order: [...order]});
const membersOf = key => groupOf.flatMap((k, i) => k === key ? [i] : []);
const nameOf = key => key === UNPLACED ? "New pictures" : groups.find(group => group.key === key).name;
// Named so that a group is never taken for a subject.
const inWords = name => /^(found )*group \d+$/.test(name) ? name : `the group “${name}”`;
const currentState = () => JSON.stringify([groups.map(group => [group.key, group.name]), groupOf]);
const unsaved = () => data !== null && currentState() !== savedState;

function change(action) {
  if (finished) return;
  forget();
  const before = snapshot();
  action();
  past.push(before);
  if (past.length > 100) past.shift();
  future = [];
  render();
}

function travel(from, to, text) {
  if (finished || !from.length) return;
  forget();
  to.push(snapshot());
  ({groups, groupOf, order} = from.pop());
  render();
  say(text);
}

const undo = () => travel(past, future, "Undone");
const redo = () => travel(future, past, "Done again");

function badName(name, key) {
  if (!name) return "A group needs a name.";
  if (name === "." || name === ".." || /[/\\]/.test(name)) return `A group cannot be called “${name}”.`;
  if (name.length > 100) return "That name is too long.";
  if (groups.some(group => group.key !== key && group.name === name))
    return `There is a group “${name}” already. To join the two, choose “Merge into”.`;
  return "";
}

function newGroup() {
  const used = new Set([...groups.map(group => group.name), ...(data.subject || [])]
    .map(name => name.toLowerCase()));
  let number = groups.length + 1;
  while (used.has(`group ${number}`)) number += 1;
  const colour = COLOURS.find(each => groups.every(group => group.colour !== each)) || "#888888";
  const group = {key: ++lastKey, name: `group ${number}`, colour, home: null};
  groups.push(group);
  return group.key;
}

function moveTo(ids, target) {
  const moving = ids.filter(i => groupOf[i] !== target);
  if (!moving.length) return;
  const made = target === NEW;
  change(() => {
    if (made) target = newGroup();
    clock += 1;
    for (const i of moving) { groupOf[i] = target; order[i] = clock; }
  });
  selected.clear();
  markSelected();
  $("target").value = target;  // where the next pictures go, too
  say(`${plural(moving.length, "picture")} moved to ${inWords(nameOf(target))}`);
  const column = columns.get(target);
  const first = column.list.querySelector(".tile.moved");
  if (first) column.list.scrollTop += first.getBoundingClientRect().top - column.list.getBoundingClientRect().top - 40;
  if (made) { column.name.focus(); column.name.select(); }
}

function rename(key, input) {
  const name = input.value.trim();
  const problem = badName(name, key);
  if (problem || name === nameOf(key)) {
    input.value = nameOf(key);
    show(problem);
    return;
  }
  show("");
  change(() => { groups.find(group => group.key === key).name = name; });
  say(`The group is called “${name}”`);
}

function merge(from, into) {
  const ids = membersOf(from);
  const name = nameOf(from);
  change(() => {
    clock += 1;
    for (const i of ids) { groupOf[i] = into; order[i] = clock; }
    groups = groups.filter(group => group.key !== from);
  });
  say(`${inWords(name)} is merged into ${inWords(nameOf(into))}`);
}

// The board.

function words(i) {
  const parts = [];
  if (data.subject) parts.push(`subject ${data.subject[i]}`);
  if (data.subject && data.predicted[i] && data.predicted[i] !== data.subject[i])
    parts.push(`the model says ${data.predicted[i]}`);
  parts.push(data.found[i] ? `found in ${inWords(data.found[i])}` : "new, or of an unknown group");
  if (data.confidence[i] !== null) parts.push(`${Math.round(100 * data.confidence[i])} % sure of the group`);
  return `${data.files[i]}: ${parts.join(", ")}`;
}

// How many images of a group a training learns from: some are kept apart for the test.
const sizeToTrain = count => count - (count > 1 ? Math.max(1, Math.floor(count / 5)) : 0);

// How many pictures a group lacks at least until a training can learn it.
function lacking(key) {
  const ids = membersOf(key);
  if (!ids.length) return 0;
  if (data.held_out) return Math.max(0, data.minimum - ids.filter(i => !data.held_out[i]).length);
  let more = 0;
  while (sizeToTrain(ids.length + more) < data.minimum) more += 1;
  return more;
}

// Why no training can start, or "".
function whyBlocked() {
  if (new Set(groupOf.filter(key => key > UNPLACED)).size < 2) return "A training needs at least two groups.";
  const small = groups.filter(group => lacking(group.key));
  if (!small.length) return "";
  const each = small.map(group => `“${group.name}” needs at least ${plural(lacking(group.key), "more picture")}`).join(", ");
  return `“Train” has to wait: ${each}. Move pictures there, or merge the group with another. Each group needs ${data.minimum} pictures to learn from, and some more are kept apart for a test.`;
}

function makeTile(i) {
  const picture = element("img", {alt: data.files[i], decoding: "async", width: 88, height: 88,
    draggable: "false"});
  const tile = element("div", {class: "tile", role: "option", "aria-selected": "false",
    tabindex: "-1", draggable: "true", title: words(i)}, picture);
  tile.dataset.number = i;
  seen.observe(tile);
  return tile;
}

// Thumbnails are asked for when they are nearly visible. What has scrolled past is asked for no more.
const seen = new IntersectionObserver(entries => {
  for (const {target, isIntersecting} of entries) {
    const picture = target.firstElementChild;
    if (isIntersecting && !picture.hasAttribute("src")) picture.src = `thumbnail/${target.dataset.number}`;
    else if (!isIntersecting && !picture.complete) picture.removeAttribute("src");
  }
}, {rootMargin: "200px", scrollMargin: "200px"});

function makeUnplaced() {
  const count = element("span", {class: "count quiet"});
  const all = element("button", {type: "button", onclick: () => select(membersOf(UNPLACED), true)}, "Select all");
  const list = element("div", {class: "pictures", role: "listbox", "aria-multiselectable": "true"});
  const hint = "In no group yet. Drag them to a group. Those that stay here are put into the most similar group by “Train”.";
  const column = element("section", {class: "group unplaced"}, element("div", {class: "head"},
    element("strong", {class: "title"}, nameOf(UNPLACED)), element("div", {class: "row"}, count, all),
    element("p", {class: "quiet hint"}, hint)), list);
  column.dataset.key = UNPLACED;
  return {column, count, all, list, drawn: ""};
}

function makeColumn(group) {
  if (group.key === UNPLACED) return makeUnplaced();
  const name = element("input", {class: "name", "aria-label": "Name of the group", maxlength: "100",
    onchange: event => rename(group.key, event.target),
    onkeydown: event => {
      if (event.key === "Enter") event.target.blur();
      if (event.key === "Escape") { event.target.value = nameOf(group.key); event.target.blur(); }
    }});
  const count = element("span", {class: "count quiet"});
  const all = element("button", {type: "button", onclick: () => {
    select(membersOf(group.key), true);
  }}, "Select all");
  const into = element("select", {"aria-label": "Merge into", onchange: event => {
    if (event.target.value) merge(group.key, Number(event.target.value));
  }});
  const list = element("div", {class: "pictures", role: "listbox", "aria-multiselectable": "true"});
  const small = element("p", {class: "small"});
  const column = element("section", {class: "group"}, element("div", {class: "head"}, name,
    element("div", {class: "row"}, count, all, into), small), list);
  column.dataset.key = group.key;
  return {column, name, count, all, into, small, list, drawn: ""};
}

function drawTiles(parts, key, home) {
  const ids = membersOf(key);
  const first = key === UNPLACED ? "New" : "Unsure";
  const sections = [[first, "unsure", []], ["Moved here", "moved", []], ["Sure", "sure", []]];
  for (const i of ids) {
    if (key === UNPLACED) { sections[0][2].push(i); continue; }
    const moved = data.found[i] ? data.found[i] !== home : order[i] > 0;
    sections[moved ? 1 : data.unsure[i] ? 0 : 2][2].push(i);
  }
  const least = (a, b) => (data.confidence[a] ?? 1) - (data.confidence[b] ?? 1) || a - b;
  sections[0][2].sort(least);
  sections[1][2].sort((a, b) => order[b] - order[a] || least(a, b));
  sections[2][2].sort(least);
  const drawn = JSON.stringify(sections.map(section => section[2]));
  if (drawn === parts.drawn) return;
  parts.drawn = drawn;
  const kept = parts.list.scrollTop;
  const children = [];
  for (const [title, type, members] of sections) {
    if (!members.length) continue;
    for (const i of members) tiles.get(i).className = `tile ${type === "sure" ? "" : type}`;
    const heading = element("h3", {class: type, role: "presentation"}, `${title}: ${members.length.toLocaleString("en")}`);
    children.push(heading, element("div", {class: "tiles", role: "group", "aria-label": title},
      ...members.map(i => tiles.get(i))));
  }
  if (!ids.length) children.push(element("p", {class: "empty"}, "No pictures. An empty group is not saved."));
  parts.list.replaceChildren(...children);
  parts.list.scrollTop = kept;
}

function options(select, first, except) {
  const choices = groups.filter(group => group.key !== except)
    .map(group => element("option", {value: group.key}, group.name));
  select.replaceChildren(...first, ...choices);
}

function render() {
  const unplaced = membersOf(UNPLACED).length ? [{key: UNPLACED, name: nameOf(UNPLACED), home: null}] : [];
  const shown = [...unplaced, ...groups];
  const keys = new Set(shown.map(group => group.key));
  for (const [key, parts] of columns) if (!keys.has(key)) { parts.column.remove(); columns.delete(key); }
  shown.forEach((group, place) => {
    if (!columns.has(group.key)) columns.set(group.key, makeColumn(group));
    const parts = columns.get(group.key);
    if ($("board").children[place] !== parts.column) $("board").insertBefore(parts.column, $("board").children[place] || null);
    if (group.key) parts.column.style.setProperty("--colour", group.colour);
    parts.column.setAttribute("aria-label", group.name);
    parts.list.setAttribute("aria-label", `Pictures of ${group.name}`);
    if (parts.name) if (document.activeElement !== parts.name || parts.name.value !== group.name) parts.name.value = group.name;
    drawTiles(parts, group.key, group.home);
    const size = membersOf(group.key).length;
    parts.count.textContent = plural(size, "picture");
    parts.all.disabled = !size;
    if (parts.name) {
      parts.small.hidden = !lacking(group.key);
      parts.small.textContent = `Too small to train: at least ${plural(lacking(group.key), "more picture")}`;
      parts.into.hidden = groups.length < 2;
      options(parts.into, [element("option", {value: ""}, "Merge into")], group.key);
    }
    if (!parts.list.querySelector(".tile[tabindex='0']")) {
      const first = parts.list.querySelector(".tile");
      if (first) first.tabIndex = 0;
    }
  });
  summarise();
  markSelected();
}

// The one place that says what can be done: it follows from `finished`, `saving`, `training`, the
// history and the difference from what is saved.
function summarise() {
  const filled = new Set(groupOf.filter(key => key > UNPLACED)).size;
  const fresh = membersOf(UNPLACED).length;
  const changed = unsaved();
  const blocked = whyBlocked();
  const state = finished ? "finished" : changed ? "not saved yet" : "saved";
  const parts = [plural(groupOf.filter(key => key !== GONE).length, "picture"), plural(filled, "group")];
  if (fresh) parts.push(`${fresh.toLocaleString("en")} in no group yet`);
  if (training) parts.push("training");
  $("summary").textContent = [...parts, state].join(", ");
  $("undo").disabled = finished || !past.length;
  $("redo").disabled = finished || !future.length;
  $("save").disabled = finished || saving || !changed;
  $("train").disabled = finished || training || Boolean(blocked);
  $("blocked").textContent = blocked;
  $("blocked").hidden = finished || !blocked;
}

// What the folder has besides the pictures of the groups.
function showFolder() {
  $("notes").replaceChildren(...data.notes.map(note => element("p", {}, `Note: ${note}.`)));
  $("notes").hidden = !data.notes.length;
  const count = data.left_out.reduce((sum, entry) => sum + entry.files.length, 0);
  $("left-out").hidden = !count;
  $("left-out").firstElementChild.textContent = `${plural(count, "file")} of the folder left out`;
  $("left-out").lastElementChild.replaceChildren(...data.left_out.map(({reason, fix, files}) =>
    element("li", {}, `${files.join(", ")}: ${reason}. ${fix}`)));
}

// Selection.

function markSelected() {
  for (const [i, tile] of tiles) {
    const is = String(selected.has(i));
    if (tile.getAttribute("aria-selected") !== is) tile.setAttribute("aria-selected", is);
  }
  $("chosen").hidden = !selected.size;
  $("chosen-count").textContent = `${plural(selected.size, "picture")} selected`;
  const chosen = $("target").value;
  const from = new Set([...selected].map(i => groupOf[i]));
  options($("target"), [], from.size === 1 ? [...from][0] : null);
  $("target").append(element("option", {value: NEW}, "a new group"));
  if ([...$("target").options].some(option => option.value === chosen)) $("target").value = chosen;
}

function select(ids, on) {
  for (const i of ids) if (on) selected.add(i); else selected.delete(i);
  markSelected();
}

const numberOf = tile => Number(tile.dataset.number);
const siblings = tile => [...tile.closest(".pictures").querySelectorAll(".tile")];

function between(first, last) {
  const all = siblings(last).map(numberOf);
  const [a, b] = [all.indexOf(first), all.indexOf(numberOf(last))];
  if (a < 0) return [numberOf(last)];
  return all.slice(Math.min(a, b), Math.max(a, b) + 1);
}

function focusTile(tile) {
  const list = tile.closest(".pictures");
  for (const other of list.querySelectorAll(".tile[tabindex='0']")) other.tabIndex = -1;
  tile.tabIndex = 0;
  tile.focus();
  tile.scrollIntoView({block: "nearest"});
}

function clicked(event) {
  const tile = event.target.closest(".tile");
  if (!tile || finished) return;
  const i = numberOf(tile);
  if (event.shiftKey && anchor !== null) select(between(anchor, tile), true);
  else { select([i], !selected.has(i)); anchor = i; }
  focusTile(tile);
}

function enlarge(tile) {
  const i = numberOf(tile);
  $("large-picture").src = `picture/${i}`;
  $("large-picture").alt = data.files[i];
  $("large-name").textContent = words(i);
  if (!$("large").open) $("large").showModal();
}

// The next tile in the direction of an arrow, or null.
function neighbour(tile, key) {
  const all = siblings(tile);
  const at = all.indexOf(tile);
  if (key === "ArrowLeft") return all[at - 1];
  if (key === "ArrowRight") return all[at + 1];
  if (key === "Home") return all[0];
  if (key === "End") return all[all.length - 1];
  const down = key === "ArrowDown";
  const here = tile.getBoundingClientRect();
  let best = null;
  for (const other of down ? all.slice(at + 1) : all.slice(0, at).reverse()) {
    const there = other.getBoundingClientRect();
    if (Math.abs(there.top - here.top) < 5) continue;
    if (best && Math.abs(there.top - best.top) > 5) break;
    const distance = Math.abs(there.left - here.left);
    if (!best || distance < best.distance) best = {other, distance, top: there.top};
  }
  return best && best.other;
}

function tileKey(event) {
  const tile = event.target.closest(".tile");
  if (!tile || finished) return;
  const i = numberOf(tile);
  if (event.key === " ") { select([i], !selected.has(i)); anchor = i; }
  else if (event.key === "Enter") enlarge(tile);
  else if (event.key === "a" && (event.ctrlKey || event.metaKey)) select(siblings(tile).map(numberOf), true);
  else if (event.key.toLowerCase() === "m" && !event.ctrlKey && !event.metaKey) {
    if (!selected.size) select([i], true);
    $("target").focus();
  } else if (event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End") {
    const next = neighbour(tile, event.key);
    if (next) {
      if (event.shiftKey) select([i, numberOf(next)], true);
      focusTile(next);
    }
  } else return;
  event.preventDefault();
}

function moveSelected() {
  const value = $("target").value;
  moveTo([...selected], value === NEW ? NEW : Number(value));
}

// Dragging.

const zoneOf = event => event.target instanceof Element ? event.target.closest(".group:not(.unplaced), #new") : null;

function unmark() {
  for (const zone of document.querySelectorAll(".over")) zone.classList.remove("over");
}

document.addEventListener("dragstart", event => {
  const tile = event.target instanceof Element && event.target.closest(".tile");
  if (!tile) return;
  if (finished) { event.preventDefault(); return; }
  const i = numberOf(tile);
  dragged = selected.has(i) ? [...selected] : [i];
  event.dataTransfer.effectAllowed = "move";
  event.dataTransfer.setData("text/plain", plural(dragged.length, "picture"));
  if (dragged.length > 1) {
    const ghost = element("div", {id: "ghost"}, plural(dragged.length, "picture"));
    document.body.append(ghost);
    event.dataTransfer.setDragImage(ghost, 10, 10);
    setTimeout(() => ghost.remove(), 0);
  }
});
document.addEventListener("dragover", event => {
  const zone = dragged && zoneOf(event);
  unmark();
  if (!zone) return;
  event.preventDefault();
  event.dataTransfer.dropEffect = "move";
  zone.classList.add("over");
});
document.addEventListener("drop", event => {
  const zone = dragged && zoneOf(event);
  unmark();
  if (!zone) return;
  event.preventDefault();
  moveTo(dragged, zone.id === "new" ? NEW : Number(zone.dataset.key));
});
document.addEventListener("dragend", () => { dragged = null; unmark(); });

// The server.

async function ask(path, body) {
  const request = body === undefined ? {} : {method: "POST", body: JSON.stringify(body),
    headers: {"Content-Type": "application/json"}};
  let response;
  try {
    response = await fetch(path, {...request, cache: "no-store", redirect: "error"});
  } catch {
    if (training) $("training").hidden = true;  // which ended with the program
    training = false;
    throw new Error("The program that serves this page has stopped. Saved groups are kept; what is not saved is only in this window. To go on, enter the command again in the terminal, and open the address that it prints.");
  }
  const answer = await response.json();
  if (!response.ok) throw Object.assign(new Error(answer.error), {status: response.status, answer});
  return answer;
}

// Take over what is on the page as what the file has.
function markSaved() {
  saved = snapshot();
  savedState = currentState();
}

function fill(loaded) {
  data = loaded;
  lastKey = 0;
  groups = [];
  groupOf = new Array(data.files.length).fill(UNPLACED);
  for (const i of data.gone) groupOf[i] = GONE;
  order = new Array(data.files.length).fill(0);
  for (const {name, images, colour} of data.groups) {
    const counts = new Map();
    for (const i of images) if (data.found[i]) counts.set(data.found[i], (counts.get(data.found[i]) || 0) + 1);
    const home = [...counts].sort((a, b) => b[1] - a[1])[0];
    const key = ++lastKey;
    groups.push({key, name, colour, home: home ? home[0] : null});
    for (const i of images) groupOf[i] = key;
  }
  seen.disconnect();
  for (const parts of columns.values()) parts.column.remove();
  columns.clear();
  tiles.clear();
  for (let i = 0; i < data.files.length; i += 1) if (groupOf[i] !== GONE) tiles.set(i, makeTile(i));
  [past, future] = [[], []];
  selected.clear();
  markSaved();
  showFolder();
  render();
}

async function load() {
  fill(await ask("images"));
  show("");
}

async function save() {
  if (finished || saving) return false;
  if (!unsaved()) return true;
  const [kept, state] = [snapshot(), currentState()];
  const sent = groups.map(group => ({name: group.name, images: membersOf(group.key)}));
  saving = true;
  summarise();
  try {
    const answer = await ask("save", {version: data.version, groups: sent});
    data.version = answer.version;
    [saved, savedState] = [kept, state];
    show(`Saved in ${answer.file}.`, true);
    say("Saved");
  } catch (error) {
    if (error.status === 409) {
      data.other = error.answer.version;
      show(error.message, false, "reload", "overwrite");
    } else show(error.message);
  }
  saving = false;
  summarise();
  return !unsaved();
}

async function train() {
  if (training || !await save()) return;
  training = true;
  summarise();
  try {
    await ask("train", {});
    show("");
    await watch();
  } catch (error) {
    training = false;
    if (!finished) show(error.message);
    summarise();
  }
}

// A line of the training in words for people. Lines that are not known are shown as they are.
const STAGES = [
  [/^(?:precomputing|looking at) .*: (\d+)\/(\d+) images?, (about .+ left)$/, "reading the pictures: $1 of $2, $3"],
  [/^(?:precomputing|looking at|reading) .*$/, "reading the pictures …"],
  [/^pretrained features .*$/, "comparing the pictures …"],
  [/^training HMOE .*$/, "learning the groups …"],
  [/^\[.*\] .* (\d+)\/(\d+) updates, (about .+ left).*$/, "learning the groups: step $1 of $2, $3"],
  [/^\[\d+\/\d+\] .*$/, "learning the groups …"],
  [/^evaluating all images .*$/, "testing the model …"],
  [/^colour and contrast .*$/, "writing the page …"],
  [/^note: .*$/, ""],
];

function inPlainWords(line) {
  for (const [pattern, text] of STAGES) if (pattern.test(line)) return line.replace(pattern, text);
  return line;
}

// What a running training does: its last line that is no note.
function stage(lines) {
  for (const line of [...lines].reverse()) if (inPlainWords(line)) return inPlainWords(line);
  return "starting …";
}

function showTraining(status) {
  training = status.state === "running";
  $("training").classList.toggle("failed", status.state === "failed");
  $("last-report").hidden = !status.has_report;
  $("training").hidden = status.state === "none";
  $("stop").hidden = !training;
  const texts = {running: `Training, ${Math.round(status.seconds)} s.`, failed: "The training failed.",
    stopped: "The training was stopped.", done: "The training is done."};
  $("training-state").textContent = texts[status.state] || "";
  const model = [`New model: ${status.run_id}.`, ...status.notes.map(note => `Note: ${note}.`)].join(" ");
  const last = status.lines[status.lines.length - 1] || "";
  $("training-line").textContent = {done: model, running: stage(status.lines), failed: last}[status.state] || "";
  $("trained").hidden = status.state !== "done";
  $("verdict").textContent = status.verdict;
  $("command").textContent = status.command || "";
  $("training-lines").textContent = status.lines.join("\n");
  $("report").hidden = status.state !== "done";
  summarise();
}

// Continue with the table of a training. It has the groups that it was trained on, so changes that
// are not saved yet can still be saved, unless it has placed or found pictures.
async function takeOver(status) {
  if (!unsaved()) await load();
  else if (status.replaced === data.version && status.count === data.files.length && !membersOf(UNPLACED).length)
    data.version = status.version;
}

async function watch() {
  for (;;) {
    const status = await ask("training");
    if (finished) return;
    showTraining(status);
    if (status.state !== "running") {
      if (status.state === "done" && status.version !== data.version) await takeOver(status);
      say($("training-state").textContent);
      return;
    }
    await new Promise(resolve => setTimeout(resolve, 1000));
  }
}

async function done() {
  if (unsaved() && !confirm("There are changes that are not saved. Leave without them?")) return;
  if (training && !confirm("A training is running. Stop it and leave?")) return;
  try {
    const answer = await ask("done", {});
    const lost = unsaved();
    finished = true;
    ({groups, groupOf, order} = saved);  // the page shows what the file has
    [past, future] = [[], []];
    selected.clear();
    render();
    if (training) $("training").hidden = true;
    training = false;
    for (const id of ["report", "last-report", "trained"]) $(id).hidden = true;
    document.body.classList.add("finished");
    document.querySelectorAll("button, input, select").forEach(control => { control.disabled = true; });
    const without = lost ? ", without the changes that were not saved" : "";
    const page = answer.page ? ` The page is ${answer.page}.` : "";
    const next = answer.command ? ` To use the model on other pictures, enter in a terminal: ${answer.command}` : "";
    show(`Finished. The groups are in ${answer.file}${without}.${page} You can close this window.${next}`, true);
  } catch (error) { show(error.message); }
}

const guarded = action => async () => {
  try { await action(); } catch (error) { show(error.message); }
};

// What happens on a click or a key.

$("board").append(element("div", {id: "new"}, "Drop pictures here, or",
  element("button", {type: "button", onclick: () => {
    let key;
    change(() => { key = newGroup(); });
    columns.get(key).name.focus();
    columns.get(key).name.select();
  }}, "New group")));
$("board").addEventListener("click", clicked);
$("board").addEventListener("dblclick", event => {
  const tile = event.target.closest(".tile");
  if (tile) enlarge(tile);
});
$("board").addEventListener("keydown", tileKey);
$("undo").addEventListener("click", undo);
$("redo").addEventListener("click", redo);
$("save").addEventListener("click", save);
$("train").addEventListener("click", train);
$("done").addEventListener("click", done);
$("stop").addEventListener("click", guarded(() => ask("stop", {})));
$("reload").addEventListener("click", guarded(load));
$("overwrite").addEventListener("click", () => { data.version = data.other; save(); });
$("dismiss").addEventListener("click", () => show(""));
$("move").addEventListener("click", moveSelected);
$("clear").addEventListener("click", () => { selected.clear(); markSelected(); });
$("help").addEventListener("click", () => {
  $("keys").hidden = !$("keys").hidden;
  $("help").setAttribute("aria-expanded", String(!$("keys").hidden));
});
$("large-picture").addEventListener("error", () => {
  $("large-name").textContent = `${$("large-picture").alt} cannot be shown: it was moved, deleted or damaged.`;
});
$("target").addEventListener("keydown", event => { if (event.key === "Enter") moveSelected(); });
document.addEventListener("keydown", event => {
  const typing = event.target.matches && event.target.matches("input");
  const control = event.ctrlKey || event.metaKey;
  if (event.key === "Escape" && !typing) { selected.clear(); markSelected(); }
  else if (control && event.key.toLowerCase() === "s") { event.preventDefault(); save(); }
  else if (control && !typing && event.key.toLowerCase() === "z") {
    event.preventDefault();
    if (event.shiftKey) redo(); else undo();
  }
});
window.addEventListener("beforeunload", event => { if (unsaved()) event.preventDefault(); });
guarded(async () => { await load(); await watch(); })();
