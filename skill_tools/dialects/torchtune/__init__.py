# SPDX-License-Identifier: Apache-2.0
"""torchtune: one YAML a run, overrides on the command line, and a recipe that reads both.

- recipe: the program that `tune run` starts; it alone decides the keys that are read
- family: the task of a recipe (`full`, `lora`, `ppo`, `knowledge_distillation`, `inference`), shown by the YAML
- component: a section with `_component_`, the dotted name of the class that it builds; its other keys are arguments
"""

TORCHTUNE = "torchtune"
