@echo off
rem Opens the pages of simpletune in the browser. They run in Linux inside Windows (WSL 2), which this offers to install.
rem Double click it, or drop a folder of pictures on it. Not yet tried on Windows: see docs/how-to/install.md.
setlocal EnableExtensions DisableDelayedExpansion
title simpletune

rem Paths reach Linux as variables, by WSLENV (/p translates one): quotes and backslashes would not survive a command line.
set "SIMPLETUNE_HERE="
if exist "%~dp0simpletune\windows.sh" set "SIMPLETUNE_HERE=%~dp0"
set "SIMPLETUNE_PICTURES=%~1"
set "WSLENV=SIMPLETUNE_HERE/p:SIMPLETUNE_PICTURES:SIMPLETUNE_SOURCE:%WSLENV%"

where wsl.exe >nul 2>nul
if not "%errorlevel%"=="0" goto :too_old
:start
rem By exit codes (of wsl.exe also -1), and by what Linux prints: wsl.exe itself prints UTF-16, in the language of Windows.
wsl.exe -e bash -c true <nul >nul 2>nul
if not "%errorlevel%"=="0" goto :no_linux
wsl.exe -e bash -c "uname -r | grep -q -e -Microsoft"
if "%errorlevel%"=="0" goto :wsl_1
if defined SIMPLETUNE_HERE goto :run
wsl.exe -e bash -c "test -f ~/simpletune/simpletune/windows.sh"
if "%errorlevel%"=="0" goto :run
echo simpletune is not beside this file, nor in the folder simpletune of your Linux home.
if not defined SIMPLETUNE_SOURCE set /p "SIMPLETUNE_SOURCE=Address to clone it from (https://...): "
wsl.exe -e bash -c "set -f; IFS=; git clone -- $SIMPLETUNE_SOURCE ~/simpletune"
if not "%errorlevel%"=="0" goto :no_clone

:run
wsl.exe -e bash -c "set -f; IFS=; exec bash ${SIMPLETUNE_HERE:-$HOME/simpletune/}simpletune/windows.sh"
if not "%errorlevel%"=="0" goto :stop
exit /b 0

:no_linux
wsl.exe -l -q <nul >nul 2>nul
if "%errorlevel%"=="0" goto :no_start
echo simpletune runs in Linux inside Windows (WSL 2), and no Linux is installed.
echo To install it, Windows downloads about 1 GB and asks for permission. It may have to restart.
choice /c YN /m "Install WSL 2 with Ubuntu 24.04 now"
if errorlevel 2 goto :stop
wsl.exe --install -d Ubuntu-24.04
if not "%errorlevel%"=="0" goto :no_install
echo.
echo If Ubuntu asks for it, choose a name and a password. If Windows asks for it, restart.
echo Then double click simpletune.bat again.
goto :stop

:wsl_1
set "distribution="
for /f "delims=" %%d in ('wsl.exe -e printenv WSL_DISTRO_NAME') do set "distribution=%%d"
echo "%distribution%" runs in WSL 1, where programs cannot use the graphics card. simpletune needs WSL 2.
echo To convert it takes minutes. Its files stay.
choice /c YN /m "Convert it to WSL 2 now"
if errorlevel 2 goto :stop
wsl.exe --set-version "%distribution%" 2
if "%errorlevel%"=="0" goto :start
echo It was not converted: see the lines above. Remedy: wsl --update
goto :virtual

:no_start
echo A Linux is installed, but the default one does not start, or has no bash (Docker's has none). Windows says:
wsl.exe -e bash -c true
echo See which there are: wsl -l -v    choose one: wsl --set-default NAME    or add one: wsl --install -d Ubuntu-24.04
:virtual
echo If Windows names virtualisation (0x80370102): turn it on in the BIOS (Intel VT-x, AMD SVM), restart,
echo then run this as administrator: wsl --install --no-distribution
goto :stop

:too_old
echo This Windows has no wsl.exe. simpletune needs Windows 11, or Windows 10 with all updates since 2021.
goto :stop
:no_install
echo WSL 2 was not installed: see the lines above. Remedy: check the network, run Windows Update, or see
echo https://learn.microsoft.com/windows/wsl/install
goto :virtual
:no_clone
echo "%SIMPLETUNE_SOURCE%" could not be cloned: see the lines above. Check the address and the network.

:stop
pause
exit /b 1
