"use strict";
// Text that learners wrote goes into textContent only, so it cannot inject HTML.

const SIGNS = { stuck: "\u2016", wrong: "\u21bb", works: "\u25b8", done: "\u2713", idle: "\u2026", away: "\u2205" };
const EVERY_MS = 1000;
const key = location.hash.slice(1);
const at = (id) => document.getElementById(id);

function made(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function long(seconds) {
  return seconds < 60 ? `${seconds} s` : seconds < 5400 ? `${Math.floor(seconds / 60)} min` : `${Math.floor(seconds / 3600)} h`;
}

function tile(learner) {
  const [book, section, exercise] = learner.place;
  const element = made("li", undefined, learner.kind);
  const head = made("div", undefined, "head");
  head.append(made("span", `${SIGNS[learner.kind]} ${learner.kind} ${long(learner.for)}`), made("span", `\u2713 ${learner.passed}`));
  element.append(head, made("div", learner.alias, "alias"), made("div", book, "place"), made("div", exercise || section, "place"));
  if (learner.says) element.append(made("div", learner.says, "says"));
  element.title = [learner.alias, book, section, exercise, learner.says].filter(Boolean).join("\n");
  return element;
}

function rows(table) {
  const most = Math.max(1, ...table.map((row) => row[1]));
  return table.map(([text, number, shown]) => {
    const row = made("div", undefined, "row"), bar = made("div", undefined, "bar");
    bar.style.width = `${(100 * number) / most}%`;
    row.append(bar, made("span", text), made("span", shown ?? number));
    return row;
  });
}

function show(id, ...parts) {
  at(id).replaceChildren(...(parts.flat().length ? parts.flat() : [made("p", "Nothing yet.")]));
}

function draw(room) {
  at("join").textContent = `lab.join("${room.code}@${room.address || location.origin + location.pathname.replace("page.html", "")}", "your alias")`;
  const count = Object.keys(SIGNS).map((kind) => [kind, room.tiles.filter((learner) => learner.kind === kind).length]);
  show("counts", count.filter(([, number]) => number).map(([kind, number]) => made("li", `${SIGNS[kind]} ${number} ${kind}`)));
  const columns = Math.max(5, Math.ceil(Math.sqrt(room.tiles.length * 1.1)));
  const style = document.documentElement.style;
  style.setProperty("--columns", columns);
  const letters = Math.max(11, Math.min(17, Math.round(110 / columns)));
  const tall = Math.min(220, document.querySelector("main").clientHeight / Math.ceil(room.tiles.length / columns) - 9);
  style.setProperty("--letters", `${letters}px`);
  style.setProperty("--lines", Math.max(1, Math.floor((tall - 26) / (1.3 * letters) - 4)));  // four lines stand above the sentence
  const order = new Intl.Collator(undefined, { numeric: true });
  show("tiles", room.tiles.sort((a, b) => order.compare(a.alias, b.alias)).map(tile));
  show("times", rows(room.times.map(([name, seconds, people]) => [name, seconds, `${long(seconds)}, ${people} at it`])));
  show("wrong", rows(room.wrong.map(([name, says, people]) => [`${name}: ${says}`, people])));
  const guesses = room.guesses;
  show("guesses", guesses ? [
    made("p", `${guesses.name}: ${guesses.of} guessed, ${guesses.compared} have seen the answer`),
    ...Object.entries(guesses.bars).flatMap(([name, bars]) => [...(name === guesses.name ? [] : [made("p", name)]), ...rows(bars)]),
  ] : []);
  const quiz = room.quiz;
  show("quiz", quiz ? [
    made("p", `${quiz.name}: ${quiz.asks}`), ...rows(quiz.options),
  ] : []);
}

async function look() {
  try {
    const answer = await fetch("room", { headers: { Authorization: `Bearer ${key}` }, cache: "no-store" });
    if (answer.ok) draw(await answer.json());
    else at("join").textContent = "this page needs the whole address that dtlib wall printed";
  } catch {
    at("join").textContent = "the wall does not answer";
  }
  setTimeout(look, EVERY_MS);
}

function theme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

theme(matchMedia("(prefers-color-scheme: dark)").matches);
at("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme !== "dark"));
look();
