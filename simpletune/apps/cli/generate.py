"""Verbs that draw: generate, compare."""

from __future__ import annotations

import argparse

from simpletune.system.startup import import_libraries


def generate(args: argparse.Namespace) -> None:
    """draw pictures with a run's result, a LoRA or the base model"""
    import_libraries()
    from simpletune.commands.generate.generate import generate as run

    run(args)


def generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``generate``."""
    from simpletune.apps.cli.generate_arguments import add_arguments

    add_arguments(parser)


def compare(args: argparse.Namespace) -> None:
    """draw the same pictures with several models and show them side by side"""
    import_libraries()
    from simpletune.commands.generate.compare import compare as run

    run(args)


def compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``compare``."""
    from simpletune.apps.cli.generate_arguments import add_compare_arguments

    add_compare_arguments(parser)


VERBS = {"generate": (generate, generate_arguments), "compare": (compare, compare_arguments)}
