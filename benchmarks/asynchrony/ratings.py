"""Ratings like MovieLens', drawn from a seed: no film, user or rating is real.

    films   popularity by rank, one to four of 18 genres; factors: the mean of their genres', and some of their own
    users   log-normal activity, a first day, factors            rating = level of user and film + product of factors
    times   after the user's first day; lines are in their order          + noise, rounded to 1, 2, … 5

Numbers of users, films and genres are those of MovieLens 1M. A user rates a film once. Files have the layout of 1M:
ratings.dat ``user::film::rating::time`` and movies.dat ``film::title::genres``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUM_FILMS", "NUM_GENRES", "NUM_USERS", "write_ratings"]

NUM_USERS, NUM_FILMS, NUM_GENRES = 6_040, 3_706, 18
#: Share of films with one, two, three and four genres: 1.7 in the mean.
_GENRES_OF_A_FILM = (0.48, 0.34, 0.14, 0.04)
_NUM_FACTORS = 6
#: Mean rating, and the standard deviations of its parts; the noise is a person's who rates again.
_MEAN, _USER, _FILM, _TASTE, _NOISE = 3.6, 0.4, 0.5, 0.55, 0.6
#: Three years in seconds, and the mean time from a user's first day to a rating, as a share of them.
_SPAN_S, _STAY = 94_608_000, 0.15

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


def write_ratings(folder: Path, examples: int, seed: int) -> None:
    """Write ratings.dat with so many ratings, and movies.dat."""
    rng = np.random.default_rng(seed)
    genres, film_factors = _films(rng)
    users, films = _pairs(rng, examples)
    ratings = _ratings(rng, users, films, film_factors)
    first = rng.random(NUM_USERS)
    times = ((first[users] + rng.exponential(_STAY, examples)) * _SPAN_S).astype(np.int64)
    order = np.argsort(times, kind="stable")
    lines = zip(*(column[order].tolist() for column in (users + 1, films + 1, ratings, times)), strict=True)
    text = "".join(f"{user}::{film}::{rating}::{time}\n" for user, film, rating, time in lines)
    (folder / "ratings.dat").write_text(text, encoding="utf-8")
    names = ("|".join(f"Genre{number:02}" for number in np.flatnonzero(row)) for row in genres)
    text = "".join(f"{film}::Film {film}::{name}\n" for film, name in enumerate(names, start=1))
    (folder / "movies.dat").write_text(text, encoding="utf-8")


def _films(rng: np.random.Generator) -> tuple[NDArray[np.bool_], Floats]:
    """Genres bool ``[films, genres]`` and factors ``[films, factors]``."""
    shares = 1.0 / np.arange(1, NUM_GENRES + 1)
    counts = 1 + rng.choice(len(_GENRES_OF_A_FILM), NUM_FILMS, p=_GENRES_OF_A_FILM)
    keys = np.log(shares) + rng.gumbel(size=(NUM_FILMS, NUM_GENRES))  # the largest: drawn without replacement
    places = np.argsort(np.argsort(-keys, axis=1), axis=1)
    genres = places < counts[:, None]
    of_genres = rng.normal(size=(NUM_GENRES, _NUM_FACTORS))
    factors = genres @ of_genres / counts[:, None] + 0.6 * rng.normal(size=(NUM_FILMS, _NUM_FACTORS))
    return genres, factors


def _pairs(rng: np.random.Generator, count: int) -> tuple[Ids, Ids]:
    """Users and films ``[count]``, each pair once."""
    activity = np.exp(rng.normal(0.0, 1.0, NUM_USERS))
    popularity = rng.permutation(1.0 / (np.arange(NUM_FILMS) + 50.0))
    pairs: Ids = np.empty(0, np.int64)
    while pairs.size < count:
        users = rng.choice(NUM_USERS, count, p=activity / activity.sum())
        films = rng.choice(NUM_FILMS, count, p=popularity / popularity.sum())
        pairs = np.union1d(pairs, users * NUM_FILMS + films)
    chosen = rng.permutation(pairs)[:count]
    return chosen // NUM_FILMS, chosen % NUM_FILMS


def _ratings(rng: np.random.Generator, users: Ids, films: Ids, film_factors: Floats) -> Ids:
    """Ratings ``[n]``, 1 to 5."""
    user_factors = rng.normal(size=(NUM_USERS, _NUM_FACTORS))
    taste = np.einsum("nk,nk->n", user_factors[users], film_factors[films])
    score = _MEAN + _USER * rng.normal(size=NUM_USERS)[users] + _FILM * rng.normal(size=NUM_FILMS)[films]
    score = score + _TASTE * taste / taste.std() + _NOISE * rng.normal(size=users.size)
    rounded: Ids = np.clip(np.rint(score), 1, 5).astype(np.int64)
    return rounded
