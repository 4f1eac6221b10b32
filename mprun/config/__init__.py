"""The configuration: typed options with roles, the rules across them, composition by Hydra."""
