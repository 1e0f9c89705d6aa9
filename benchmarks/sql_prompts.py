"""Prompts of one narrow task, SQL queries over a few schemas, for showing what a distilled draft is worth.
It must never give another list for the same seed, nor write an answer.

    python benchmarks/sql_prompts.py 600 > sql.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence

SCHEMAS = {
    "shop": {
        "customers": ("id", "name", "city", "age", "joined_at"),
        "orders": ("id", "customer_id", "total", "status", "ordered_at"),
        "products": ("id", "title", "category", "price", "stock"),
    },
    "library": {
        "members": ("id", "name", "city", "age", "joined_at"),
        "loans": ("id", "member_id", "fee", "status", "lent_at"),
        "books": ("id", "title", "genre", "price", "copies"),
    },
    "clinic": {
        "patients": ("id", "name", "town", "age", "registered_at"),
        "visits": ("id", "patient_id", "cost", "outcome", "visited_at"),
        "drugs": ("id", "label", "kind", "price", "packs"),
    },
    "gym": {
        "athletes": ("id", "name", "club", "age", "started_at"),
        "bookings": ("id", "athlete_id", "price", "state", "booked_at"),
        "courses": ("id", "title", "level", "fee", "places"),
    },
}
"""By name: people, events that point at them, and things; columns in the same roles."""
QUESTIONS = (
    "How many {people} are there in each {place}?",
    "List the {name} of all {people} older than {n}.",
    "Show the {n} most recent {events} with the {name} of the {person}.",
    "What is the average {amount} of {events} for each {state}?",
    "Which {people} have no {events} at all?",
    "Find the {name} and total {amount} of the {n} {people} who spent most.",
    "List {things} with a {price} between {n} and {m}, the dearest first.",
    "Count the {events} of each month of {year}.",
    "Which {group} of {things} has the highest average {price}?",
    "Show every {person} with more than {n} {events}.",
    "List the {title} of {things} whose {stock} is below {n}.",
    "What share of {events} in {year} had a {amount} above {m}?",
    "For each {place}, show the oldest {person}.",
    "Give the {n} {things} with the lowest {stock} in each {group}.",
    "List {people} who joined before {year} and have at least one event with a {amount} over {m}.",
    "How many {events} did {people} from each {place} have in {year}?",
)


def prompts(count: int, *, seed: int = 1) -> list[str]:
    """`count` distinct prompts, shuffled. Raises ValueError where the templates do not give as many."""
    rng = random.Random(seed)
    found: dict[str, None] = {}
    for _ in range(50 * count):
        schema = SCHEMAS[rng.choice(sorted(SCHEMAS))]
        found[_prompt(schema, rng)] = None
        if len(found) == count:
            return list(found)
    raise ValueError(f"the templates give about {len(found)} prompts: ask for fewer than {count}")


def _prompt(schema: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    (people, events, things), (person, event, thing) = schema, schema.values()
    words = {
        "people": people,
        "person": people.removesuffix("s"),
        "events": events,
        "things": things,
        "name": person[1],
        "place": person[2],
        "amount": event[2],
        "state": event[3],
        "title": thing[1],
        "group": thing[2],
        "price": thing[3],
        "stock": thing[4],
        "n": rng.choice((2, 3, 5, 10, 20, 30, 40)),
        "m": rng.choice((50, 75, 100, 150, 200)),
        "year": rng.choice(range(2018, 2026)),
    }
    tables = "; ".join(f"{name}({', '.join(columns)})" for name, columns in schema.items())
    return f"Tables: {tables}. Answer with one SQL query and nothing else. {rng.choice(QUESTIONS).format(**words)}"


def main() -> None:
    """JSON lines on stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for text in prompts(args.count, seed=args.seed):
        print(json.dumps({"task": "sql", "prompt": text}))


if __name__ == "__main__":
    main()
