"""Plans: forced compactions that Spark decides and this broker checks and carries out.

``plan`` is what a plan is, ``folder`` keeps plans and uploads in files, ``plans`` runs them, ``upload`` takes statements.
"""
