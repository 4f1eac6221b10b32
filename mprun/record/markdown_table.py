"""A Markdown table whose columns are aligned in plain text as well."""


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """The table as text, every column as wide as its longest cell; a `|` in a cell is escaped."""
    header, *rows = [[cell.replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])
